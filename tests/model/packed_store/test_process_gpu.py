"""Under torchrun a model compiled for one GPU runs on GPU `LOCAL_RANK` in every process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ktc
from ktc.diagnostics import HostLacks, InputRefused
from ktc.model.manifest.manifest import FILE, Manifest, Rewrite, read_manifest
from ktc.model.packed_store import process_gpu

ONE_GPU = {"model": "cuda:0", "model.layers.0.mlp.experts": "cpu", "lm_head": "cuda"}


def on_gpus(
    out: Path, placement: Mapping[str, str], prefill: Sequence[str] = (), resident: bool = False, linear: str = "cpu"
) -> Manifest:
    """The manifest of `out` with other devices, and with one more step, a streamed linear layer."""
    made = read_manifest(out)
    layer = Rewrite("lm_head", "streamed_linear", None, linear, {"stream_buffer": 1}, "rule", "f:1:1")
    rewrites = [
        replace(step, args={**step.args, "prefill": list(prefill), "resident": resident})
        if "prefill" in step.args
        else step
        for step in made.rewrites
    ]
    return replace(made, placement=placement, rewrites=(*rewrites, layer), memory={"cuda:0": 7, "cpu": 3})


def experts(manifest: Manifest) -> set[tuple[tuple[str, ...], bool]]:
    return {
        (tuple(step.args["prefill"]), step.args["resident"]) for step in manifest.rewrites if step.module == "fused_moe"
    }


def test_everything_on_the_gpu_goes_to_the_one_of_the_process(compiled: Path) -> None:
    given = on_gpus(compiled, ONE_GPU, prefill=("cuda:0",), resident=True, linear="cuda:0")
    own = process_gpu.for_process(given, compiled, 1, 2)
    assert own.placement == {"model": "cuda:1", "model.layers.0.mlp.experts": "cpu", "lm_head": "cuda:1"}
    assert own.memory == {"cuda:1": 7, "cpu": 3}
    assert own.rewrites[-1].device == "cuda:1"
    assert experts(own) == {(("cuda:1",), True)}
    assert process_gpu.for_process(own, compiled, 1, 2) == own
    back = process_gpu.for_process(own, compiled, 0, 2)
    assert back == replace(given, placement={**ONE_GPU, "lm_head": "cuda:0"})


@pytest.mark.parametrize("prefill", [("cuda:0", "cuda:1"), ("cuda:1",)])
def test_experts_streamed_to_other_gpus_pass_through_the_one_of_the_process(
    compiled: Path, prefill: tuple[str, ...]
) -> None:
    given = on_gpus(compiled, ONE_GPU, prefill=prefill, resident=True)
    assert experts(process_gpu.for_process(given, compiled, 1, 2)) == {(("cuda:1",), False)}
    on_cpu = on_gpus(compiled, {"": "cpu"}, prefill=("cuda:0", "cuda:1", "cuda:2"))
    assert experts(process_gpu.for_process(on_cpu, compiled, 2, 3)) == {(("cuda:2",), False)}


@pytest.mark.parametrize(
    ("placement", "linear"), [({"model": "cuda:0", "model.layers.1": "cuda:1"}, "cpu"), (ONE_GPU, "cuda:1")]
)
def test_a_model_on_several_gpus_is_refused(compiled: Path, placement: dict[str, str], linear: str) -> None:
    given = on_gpus(compiled, placement, linear=linear)
    with pytest.raises(InputRefused, match=r"L447.*placed on 2 GPUs \(`\w+` on `cuda:0`, `[\w.]+` on `cuda:1`\)") as it:
        process_gpu.for_process(given, compiled, 0, 2)
    assert "one process per machine" in it.value.diagnostics[0].hint


def test_a_process_takes_its_gpu_before_anything_is_loaded(
    compiled: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    given = on_gpus(compiled, ONE_GPU)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert process_gpu.for_this_process(given, compiled) is given, "the GPUs are all its own"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    on_cpu = on_gpus(compiled, {"": "cpu"})
    assert process_gpu.for_this_process(on_cpu, compiled) is on_cpu
    assert taken == []
    with caplog.at_level("INFO", "ktc"):
        own = process_gpu.for_this_process(given, compiled)
    assert (own.placement["model"], taken) == ("cuda:1", [1])
    assert f"process 1 of 2 on this machine runs `{compiled.name}` on cuda:1" in caplog.text


def test_more_processes_than_gpus_are_refused_by_load(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = compiled / FILE
    sealed = file.read_text()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    try:
        file.write_text(json.dumps({**json.loads(sealed), "placement": ONE_GPU}))
        with pytest.raises(HostLacks, match=r"L409: this run has 2 processes on this machine.*1 GPUs are seen"):
            ktc.load(compiled)
    finally:
        file.write_text(sealed)

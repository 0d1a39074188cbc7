"""A compiled model with its kernels: as exact as the stock model, no larger in memory than its weights."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

import ktc
from ktc.diagnostics import HostLacks, InputRefused
from ktc.foundation import host
from ktc.foundation.host import find_compiler
from ktc.model.loading.load import load
from ktc.model.manifest.manifest import read_manifest
from ktc.model.packed_store.memory import tensor_bytes
from ktc.stages.link import link

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture(scope="module")
def scalar_kernel(hand_made: ModuleType) -> Any:
    return hand_made.scalar_kernel()


@pytest.fixture(scope="module")
def with_kernels(
    checkpoint: Path, hand_made: ModuleType, scalar_kernel: Any, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return link(hand_made.package(checkpoint, scalar_kernel), tmp_path_factory.mktemp("build") / "v2_kernels")


def test_its_error_is_that_of_the_stock_model_in_bf16(with_kernels: Path, checkpoint: Path) -> None:
    exact, half = (
        AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, experts_implementation="eager")
        for dtype in (torch.float32, torch.bfloat16)
    )
    model = load(with_kernels)
    assert model.model.layers[1].mlp.experts.packed_bytes > 0
    ids = torch.arange(3, 300).reshape(3, 99)
    expected = exact(ids).logits
    assert (model(ids).logits - expected).abs().mean() <= 1.5 * (half(ids).logits - expected).abs().mean()
    options = {"max_new_tokens": 8, "num_beams": 2}
    assert model.generate(ids, **options).shape == (3, 107)
    reference = load(with_kernels, reference=True)
    assert torch.allclose(reference(ids).logits, expected, atol=2e-6)


def test_two_models_in_one_process_keep_their_own_kernels(with_kernels: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(with_kernels, other)
    manifest = json.loads((other / "ktc.json").read_text())
    library = other / manifest["library"]["file"]
    with library.open("ab") as file:
        file.write(b"another build")
    with pytest.raises(InputRefused, match="L411"):
        load(other)
    done = subprocess.run(["sha256sum", library], capture_output=True, text=True, check=True)
    manifest["library"]["sha256"] = done.stdout.split()[0]
    (other / "ktc.json").write_text(json.dumps(manifest))
    models = [load(with_kernels), load(other)]
    ids = torch.arange(3, 60)[None]
    assert torch.equal(models[0](ids).logits, models[1](ids).logits)


def test_kernels_for_another_machine_are_refused_before_they_run(
    with_kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    shutil.copytree(with_kernels, other)
    manifest = json.loads((other / "ktc.json").read_text())
    (other / "ktc.json").write_text(json.dumps({**manifest, "isa": "amx"}))
    monkeypatch.setattr("ktc.foundation.host._cpu_features", lambda: frozenset({"avx2", "fma", "f16c"}))
    with pytest.raises(HostLacks):
        load(other)
    assert load(other, reference=True).dtype is torch.float32


MEASURE = """
import re, sys, threading, time
from pathlib import Path
from ktc.model.loading.load import load

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

def watch():
    while not done.wait(0.001):
        samples.append(anonymous())

load(sys.argv[1])  # what the first load of a process imports and keeps is not counted
done, samples = threading.Event(), [anonymous()]
watcher = threading.Thread(target=watch)
watcher.start()
model = load(sys.argv[2], progress=lambda *_: samples.append(anonymous()))
done.set()
watcher.join()
print(samples[0], max(samples), anonymous())
"""


def by_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The names of older checkpoints: one tensor per expert and projection."""
    split: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, leaf = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(leaf)
        if parts is None:
            split[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                split[f"{stem}.{expert}.{part}.weight"] = rows.clone()
    return split


@pytest.mark.parametrize("style", ["per_expert", pytest.param("fused", marks=pytest.mark.slow)])
def test_loading_holds_the_packed_model_and_one_piece(
    hand_made: ModuleType, scalar_kernel: Any, with_kernels: Path, tmp_path: Path, style: str
) -> None:
    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=1024,
        moe_intermediate_size=512,
        num_experts=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=512,
    )
    folder = tmp_path / "big"
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = {name: torch.zeros(tensor.shape, dtype=torch.bfloat16) for name, tensor in model.state_dict().items()}
    save_file(tensors if style == "fused" else by_expert(tensors), folder / "model.safetensors")
    del tensors
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert stored > 280e6
    out = link(hand_made.package(folder, scalar_kernel), tmp_path / "big_out")
    arguments = [str(with_kernels), str(out)]
    done = subprocess.run([sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, check=True)
    before, peak, after = map(int, done.stdout.split())
    expert_group = 3 * 1024 * 512 * 2
    assert after - before > 0.95 * stored, "the model is there"
    assert peak - before < stored + expert_group + (8 << 20), "8 MiB: pages that the allocator keeps"


def test_a_loaded_model_has_the_bytes_of_its_plan(tmp_path: Path) -> None:
    out = ktc.compile(
        "tiny:deepseek_v3", "moe-lora", tmp_path / "sized_model", host=host.restrict(host.detect(), "scalar")
    )
    planned_bytes = read_manifest(out).memory
    assert tensor_bytes(ktc.load(out), {}) == pytest.approx(planned_bytes, rel=0.001)
    manifest = json.loads((out / "ktc.json").read_text())
    manifest["memory"]["cpu"] -= 2 << 20
    (out / "ktc.json").write_text(json.dumps(manifest))
    with pytest.raises(InputRefused) as refused:
        ktc.load(out)
    assert [d.code for d in refused.value.diagnostics] == ["L413"]
    assert ktc.load(out, reference=True) is not None

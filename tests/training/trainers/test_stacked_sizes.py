"""Sizes of a stacked step: tokens of a pass, rows of a chunk, and what waits for backward, in the free memory."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from stacked_training import StackingTrainer, assert_alike, peft_model, rows, trained
from torch import Tensor
from transformers import Trainer, TrainingArguments

from ktc.model.experts.backends.backend import Offload
from ktc.model.experts.backends.streamed_backend import Streamed
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.streamed.stream_sizes import result_bytes
from ktc.training.trainers import stacking, step_passes
from ktc.training.trainers.layer_calls import ModelCall, in_chunks, record
from ktc.training.trainers.layer_parts import LayerRun
from ktc.training.trainers.layer_pass import Kept, Offloaded, through_layers
from ktc.training.trainers.split_layer import CannotStack, split_layers
from ktc.training.trainers.stack_size import (
    bytes_per_token,
    fitting_chunk,
    fitting_tokens,
    kept_bytes_per_token,
    kept_layers,
)
from ktc.training.trainers.stacking import Stacker
from ktc.training.trainers.step_passes import StepSizes, passes

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_pass_has_no_more_tokens_than_fit() -> None:
    sizes = (5, 5, 5, 9, 2)
    assert list(passes(sizes, 10)) == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert list(passes(sizes, 100)) == [(0, 5)]
    held, free = {"cuda:0": 100, "cpu": 50}, {"cuda:0": 20000, "cpu": 10000}
    assert fitting_tokens(held, {"cuda:0": 1000}, free) == {"cuda:0": 150, "cpu": 160}


def test_a_chunk_of_attention_is_what_memory_leaves_beside_the_pass() -> None:
    gpu, width, loss = torch.device("cuda:0"), 2048, 300 << 20
    held, tokens = {"cuda:0": 9 * 2 * 2 * width, "cpu": 1}, 16 * 512

    def chunk(room: int, tokens: int = tokens, device: torch.device = gpu) -> int:
        call = ModelCall(torch.empty(1, 512, width, dtype=torch.bfloat16), (device,), ())
        free = {"cuda:0": int((held["cuda:0"] * tokens + loss + room) / 0.8) + 1, "cpu": 1 << 40}
        return fitting_chunk(call, held, free, loss, tokens)

    per_token = 34 * width
    assert [chunk(per_token * each) for each in (8192, 8191, 4096, 4095, 0)] == [8192, 4096, 4096, 2048, 2048]
    assert chunk(per_token * 100_000, tokens=100_000) == 8192, "more memory stays free"
    assert chunk(per_token * 3000, tokens=3000) == 8192, "a chunk that holds the whole pass"
    assert chunk(per_token * 8192, device=torch.device("cpu")) == 2048


def test_what_layers_leave_on_the_device_is_two_hidden_states_each(package: Callable[[str], Path]) -> None:
    """Beside what their experts save, which with a kernel lies on the host."""
    model = peft_model(package("qwen3_moe"))
    model.train()
    layers = split_layers(model)
    ids = rows((64,))[0]["input_ids"]
    calls = [record(layers, lambda: model(input_ids=torch.tensor([ids]), use_cache=False)) for _ in range(4)]
    chunks = [chunk for chunk, _ in in_chunks(calls, 128)]
    assert [chunk.hidden.shape[0] for chunk in chunks] == [2, 2]
    for module in model.modules():
        if isinstance(module, FusedMoe):
            module.forward = torch.no_grad()(module.forward)
    saved: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t):
        through_layers(layers, chunks)
    width = model.config.hidden_size * 4
    tokens = 4 * 64
    on_device = sum(tensor.nbytes for tensor in saved.values() if tensor.ndim == 3)
    on_host = {tensor.untyped_storage().data_ptr(): tensor for tensor in saved.values() if tensor.ndim == 2}
    assert on_device == len(layers) * 2 * width * tokens, "a layer's input and what its attention gave"
    assert sum(each.untyped_storage().nbytes() for each in on_host.values()) == len(layers) * width * tokens
    held = bytes_per_token(layers, calls[0])["cpu"]
    assert held >= (on_device + len(layers) * width * tokens) / tokens


def test_rows_of_other_processes_count_where_they_share_experts() -> None:
    alone, sharing = (result_bytes(64, 8, 2, processes) for processes in (1, 4))
    assert sharing - alone == 3 * 12 * 64, "inputs, sums and gradients of their rows; choices are divided"


def test_experts_of_a_gpu_leave_states_alone_on_the_host(
    package: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = peft_model(package("qwen3_moe"))
    layers = split_layers(model)
    ids = rows((64,))[0]["input_ids"]
    call = record(layers, lambda: model(input_ids=torch.tensor([ids]), use_cache=False))
    width = call.hidden.shape[-1]
    for module in model.modules():
        if isinstance(module, FusedMoe):
            backend: Any = Streamed(None, module.form, (torch.device("cuda:0"),))  # type: ignore[arg-type]
            monkeypatch.setattr(module, "backend", lambda tokens, backend=backend: backend)
    held = bytes_per_token(layers, call)
    item, choices = call.hidden.element_size(), next(m.top_k for m in model.modules() if isinstance(m, FusedMoe))
    assert held == {"cpu": (len(layers) * (2 + 2) + 3) * width * item, "cuda:0": (12 + choices * item) * width}


def test_states_of_a_gpu_wait_on_the_host_where_a_pass_would_not_fit(package: Callable[[str], Path]) -> None:
    model = peft_model(package("qwen3_moe"))
    layers = split_layers(model)
    ids = rows((64,))[0]["input_ids"]
    call = record(layers, lambda: model(input_ids=torch.tensor([ids]), use_cache=False))
    width = call.hidden.shape[-1] * call.hidden.element_size()
    on_gpu = ModelCall(call.hidden, (torch.device("cuda:0"),) * len(layers), call.layers)
    held = {level: bytes_per_token(layers, on_gpu, level) for level in Offloaded}
    states = {level: sizes["cuda:0"] // width - 3 for level, sizes in held.items()}  # without the last output's
    assert states == {Offloaded.NOTHING: 2 * len(layers), Offloaded.ATTENTION: len(layers) + 4, Offloaded.INPUT: 8}
    assert held[Offloaded.INPUT]["cpu"] == held[Offloaded.NOTHING]["cpu"] + len(layers) * width
    assert bytes_per_token(layers, call, Offloaded.INPUT) == bytes_per_token(layers, call)
    fused = [module for module in model.modules() if isinstance(module, FusedMoe)]
    for resident, kept in ((False, {}), (True, {"cuda:0": 2 * len(fused) * width})):
        for module in fused:
            module.offload = Offload((torch.device("cuda:0"),), min_tokens=1, resident=resident)
        assert kept_bytes_per_token(layers, on_gpu) == kept
        assert kept_layers(layers, on_gpu, 10, {"cuda:0": 1 << 40}) == (len(layers) if resident else 0)
        assert kept_bytes_per_token(layers, call) == {}, "on another device than its layer"
        assert kept_layers(layers, call, 10, {"cuda:0": 1 << 40, "cpu": 1 << 40}) == 0
    gate_up = fused[-1].top_k * 2 * fused[-1].intermediate * call.hidden.element_size()
    of_layer = 10 * (34 * call.hidden.shape[-1] + gate_up)
    assert [kept_layers(layers, on_gpu, 10, {"cuda:0": size}) for size in (of_layer - 1, of_layer)] == [0, 1]


@pytest.mark.parametrize("parts", [1, 2])
def test_layers_whose_graph_is_kept_are_computed_once_with_the_same_gradients(
    package: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    calls: list[None] = []
    attend = LayerRun.attend_and_route

    def counted(self: LayerRun, x: Tensor) -> Any:
        calls.append(None)
        return attend(self, x)

    monkeypatch.setattr(LayerRun, "attend_and_route", counted)
    theirs = trained(package("qwen3_moe"), tmp_path, "on", experts=True)
    before, sized = len(calls), Stacker._sized
    monkeypatch.setattr(Stacker, "_sized", lambda *given: replace(sized(*given), kept=Kept(False, parts)))
    ours = trained(package("qwen3_moe"), tmp_path, "on", experts=True)
    assert_alike(ours, theirs)
    layers = theirs.model.config.num_hidden_layers
    assert (len(calls) - before) * 2 * layers == before * (2 * layers - parts)
    assert f"the last {parts} layers without computing them again" in str(ours.stacker.decision)


def _recorded(package: Callable[[str], Path], tmp_path: Path) -> tuple[Stacker, ModelCall, PeftModel]:
    """A stacker before its first decision, and the call of a micro-batch of eight tokens."""
    model = peft_model(package("qwen3_moe"))
    stacker = Stacker(Trainer(model, TrainingArguments(report_to=[], output_dir=str(tmp_path), use_cpu=True)))
    stacker._layers = split_layers(model)
    ids = torch.tensor([rows((8,))[0]["input_ids"]])
    call = record(stacker._layers, lambda: model(input_ids=ids, use_cache=False))
    return stacker, call, model


@pytest.mark.parametrize(
    ("per_token", "tokens", "level"),
    [
        ((40, 20, 10), 1000, Offloaded.NOTHING),
        ((40, 20, 10), 64 * 30 // 40, Offloaded.ATTENTION),
        ((40, 20, 10), 64 * 15 // 40, Offloaded.INPUT),
        ((40, 40, 40), 64 * 15 // 40, Offloaded.NOTHING),  # nothing is gained
        ((40, 39, 38), 64 * 15 // 40, Offloaded.NOTHING),  # as many passes
    ],
)
def test_the_least_waits_that_saves_a_pass(
    per_token: tuple[int, ...], tokens: int, level: Offloaded, package: Callable[[str], Path],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """`tokens` fit with nothing in host memory, of 64 that a step has; each kind takes so many bytes per token."""
    fits = {held: tokens * per_token[0] // held for held in per_token}
    monkeypatch.setattr(step_passes, "bytes_per_token", lambda *given: {"cpu": per_token[given[2]]})
    monkeypatch.setattr(step_passes, "fitting_tokens", lambda held, *_: {"cpu": fits[held["cpu"]]})
    stacker, call, model = _recorded(package, tmp_path)
    assert stacker._sized(StepSizes((8,) * 8, 8), call, model).offloaded is level


def test_a_step_of_other_sizes_is_decided_anew(package: Callable[[str], Path], tmp_path: Path) -> None:
    asked: list[StepSizes] = []

    class Watched(Stacker):
        def _sized(self, sizes: StepSizes, *args: Any, **kwargs: Any) -> Any:
            asked.append(sizes)
            return super()._sized(sizes, *args, **kwargs)

    class Watching(StackingTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.stacker = Watched(self, "on", chunk_tokens=40)

    lengths = (5, 5, 5, 5, 30, 9, 30, 9)
    settings: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "train_sampling_strategy": "sequential",
    }
    trained(package("qwen3_moe"), tmp_path, "on", lengths=lengths, trainer=Watching, **settings)
    assert asked == [StepSizes((5, 5), 5, rows=(1, 1)), StepSizes((30, 9), 30, rows=(1, 1))]


def test_a_decision_starts_no_process_and_counts_micro_batches_that_are_not_divided_whole(
    package: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step of other sizes decides. Eight rows of eight tokens could be columns: they are one call."""
    stacker, call, model = _recorded(package, tmp_path)
    at_once: list[int] = []

    def counted(_: ModelCall, chunk_tokens: int, *args: Any) -> dict[str, int]:
        at_once.append(chunk_tokens)
        return {"cpu": 0}

    monkeypatch.setattr(step_passes, "working_bytes", counted)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process"))
    stacker._chunk_tokens = 16
    for tokens in (64, 72):
        stacker._sized(StepSizes((tokens,), 8), call, model)
    assert at_once == [64, 16]


def test_experts_of_a_gpu_are_passed_by_single_micro_batches_where_memory_is_scarce(
    package: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, as on the CPU, everything that backward needs would stay on the GPU."""
    stacker, call, model = _recorded(package, tmp_path)
    monkeypatch.setattr(step_passes, "fitting_tokens", lambda *_: {"cpu": 5})
    with pytest.raises(CannotStack, match="holds 5 tokens"):
        stacker._sized(StepSizes((8,) * 8, 8), call, model)
    monkeypatch.setattr(stacking, "_multiplied_on_a_gpu", lambda model: True)
    found = stacker._sized(StepSizes((8,) * 8, 8), call, model)
    assert (found.on, found.tokens) == (True, 8)


def test_the_padding_of_joined_micro_batches_counts_for_their_loss(
    package: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacker, call, model = _recorded(package, tmp_path)
    together: list[int] = []
    stock = stacking.loss_bytes

    def counted(trainer: Any, head: Any, tokens: int, *args: Any, **kwargs: Any) -> int:
        together.append(tokens)
        return stock(trainer, head, tokens, *args, **kwargs)

    monkeypatch.setattr(stacking, "loss_bytes", counted)
    stacker._chunk_tokens = 80
    stacker._sized(StepSizes((40, *(1,) * 15), 40), call, model)
    assert together == [80]  # a pair of 40 tokens each, where the step has 55

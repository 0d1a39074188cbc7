"""What a plan says of the kernels' memory, beside what they reserve."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernel_layers import FORMS, ISAS, Layer, Load, random_layer, spec_of
from torch import Tensor

from ktc.foundation import host
from ktc.foundation.formats import WeightFormat
from ktc.foundation.isa import INSTRUCTION_SETS, Isa
from ktc.model.experts.layouts.packed import PackedExperts
from ktc.model.experts.trained.lora import ExpertsLora, Lora
from ktc.model.kernels.form import ExpertsSizes
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.model.kernels.packed_size import packed_bytes
from ktc.model.kernels.working_memory import slots_of
from ktc.stages.codegen.build import build
from ktc.stages.codegen.render import render

TOKENS = 192
WORDS = [isa for isa in ISAS if INSTRUCTION_SETS[isa].words]
SIZES = {"hidden": 512, "intermediate": 352, "num_experts": 8, "top_k": 4}


def reserved_by(call: Callable[[], object], workspace: Callable[[], int]) -> int:
    """Bytes of the workspace after a call, in a child: it begins with none."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        call()
        os.write(write, str(workspace()).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        size = int(told.read())
    os.waitpid(child, 0)
    return size


@pytest.mark.parametrize("ranks", [(0, 0), (8, 0), (0, 17), (33, 5)])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("form", [FORMS[0], FORMS[-1]])
@pytest.mark.parametrize("keep", [True, False])
def test_a_plan_bounds_what_a_call_reserves(
    load: Load, monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, int], threads: int, form: str, keep: bool
) -> None:
    monkeypatch.setattr(host, "usable_threads", lambda: 8)
    layer = random_layer(*SIZES.values(), TOKENS, form=form)
    spec = spec_of(ISAS[0], form=form)
    experts = load(layer, spec, threads=threads).weights.packed
    assert experts is not None
    compare(experts, layer, spec, ranks, threads, keep)
    if any(ranks):
        compare(experts, layer, spec, ranks, threads, keep, dropout=0.25)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("isa", "codes"),
    [
        (ISAS[0], ("int8", 0)),
        (ISAS[0], ("int4", 32)),
        *((isa, ("q4_1", 0)) for isa in WORDS),
        *((isa, ("int4", 32)) for isa in WORDS),
        *((isa, ("fp8", 128)) for isa in WORDS),
    ],
)
def test_quantised_weights_take_scratch_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, isa: Isa, codes: tuple[WeightFormat, int]
) -> None:
    monkeypatch.setattr(host, "usable_threads", lambda: 8)
    spec = spec_of(isa, codes=codes)
    library = build(render([spec], {spec: "tests/model/experts/test_workspace.py:1:1"}), host.detect(), tmp_path)
    layer = random_layer(*SIZES.values(), TOKENS)
    for threads in (1, 3):
        experts = PackedExperts(library.kernel(spec.entry), threads, ExpertsSizes(8, 512, 352, 4))
        few_rows(experts, spec, threads)
        for ranks in ((0, 0), (8, 5)):
            for keep in (True, False):
                compare(experts, layer, spec, ranks, threads, keep)
                if any(ranks):
                    compare(experts, layer, spec, ranks, threads, keep, dropout=0.25)


def few_rows(experts: PackedExperts, spec: FusedMoeSpec, threads: int) -> None:
    layer = random_layer(*SIZES.values(), 8)

    def forward() -> None:
        experts.forward(layer.x.bfloat16(), layer.index, layer.weights.float(), save=False)

    slots = slots_of(replace(spec, **SIZES), keep=False, threads=threads)
    assert reserved_by(forward, lambda: experts._engine.workspace_bytes) <= slots.workspace(8, backward=False)


def compare(
    experts: PackedExperts, layer: Layer, spec: FusedMoeSpec, ranks: tuple[int, int], threads: int, keep: bool,
    dropout: float = 0.0,
) -> None:  # fmt: skip
    sized = replace(spec, **SIZES)
    slots = slots_of(sized, keep=keep, ranks=ranks, threads=threads, dropout=bool(dropout))
    x, index, weights = layer.x.bfloat16(), layer.index, layer.weights.float()
    lora = lora_of(ranks, layer, dropout).drawn()
    saved = experts.forward(x, index, weights, save=keep, lora=lora)[1]

    def forward() -> None:
        experts.forward(x, index, weights, save=keep, lora=lora)

    def evaluation() -> None:
        experts.forward(x, index, weights, save=False, lora=lora_of(ranks, layer, 0.0))

    def backward() -> None:
        experts.backward(layer.grad.bfloat16(), (index, weights), saved=saved, x_TH=x, lora=lora)

    for calls, is_backward in (((forward, evaluation) if dropout else (forward,), False), ((backward,), True)):
        found = max(reserved_by(call, lambda: experts._engine.workspace_bytes) for call in calls)
        many = replace(slots, _few=(0, 0))  # no expert has few rows
        assert found <= many.workspace(TOKENS, backward=is_backward) <= 1.25 * found
    assert packed_bytes(sized) == experts.nbytes


def lora_of(ranks: tuple[int, int], layer: Layer, dropout: float) -> ExpertsLora:
    def lora(rank: int, inputs: int, outputs: int) -> Lora | None:
        factor: Callable[..., Tensor] = torch.zeros
        b = factor(outputs, rank, 8).permute(2, 0, 1)  # as PEFT stores it
        return Lora(factor(8, rank, inputs), b, 1.0, dropout=dropout) if rank else None

    hidden, inner = layer.hidden, layer.intermediate
    return ExpertsLora(lora(ranks[0], hidden, inner * (1 + layer.form.gated)), lora(ranks[1], inner, hidden))

"""The whole grid of shapes against float64, for every instruction set, of bf16, int4 and fp8, with LoRA of any rank.

fp16 and GGUF's blocks have their own in `test_block_formats.py`.
Slow: one library with dynamic dimensions for all of it. Of a few tokens the errors are pooled, since a norm over a few
values that are rounded is no average. `int8`, which rounds activations too, is checked in `test_w8a8.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import pytest
import torch
from kernel_layers import CODE_ROWS, ISAS, Layer, built, experts_of, random_layer, spec_of
from lora_layers import Adapted, adapt, run_adapted
from torch import Tensor

from ktc.foundation import host
from ktc.foundation.formats import WeightFormat
from ktc.model.experts.layouts.stock_layout import ExpertPart, canonical_parts
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.references.quantised_reference import quantise
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.model.kernels.kernel_library import KernelLibrary

pytestmark = pytest.mark.slow

FORMATS: Final[tuple[tuple[WeightFormat, int] | None, ...]] = (
    None,
    ("int4", 32),
    ("int4", 64),
    ("int4", 128),
    ("fp8", 128),
)
SPECS: Final = tuple(spec_of(isa, codes=codes) for isa in ISAS for codes in FORMATS)
# Hidden and intermediate; formats whose rows are whole groups take as many groups as in the second table.
SIZES: Final = ((17, 9), (33, 65), (70, 37), (96, 64), (130, 50), (256, 192))
GROUPS: Final = ((1, 1), (1, 2), (2, 1))
# Experts, experts per token, and how many experts get any tokens.
ROUTINGS: Final = ((1, 1, 1), (4, 4, 4), (5, 2, 5), (16, 2, 2), (32, 1, 1), (64, 6, 64))
TOKENS: Final = (1, 2, 3, 5, 7, 13, 17, 64, 129, 1000, 4097)  # the last two with the first routing alone
FEW_VALUES: Final = 1024  # a case with fewer values in a result is pooled with the others
RANKS: Final = ((0, 0), (1, 8), (33, 0), (0, 5), (128, 16))
BOUNDS: Final = (3e-3, 4e-3, 5e-3, 5e-3, 5e-3, 5e-3, 5e-3)  # output, hidden states, routing weights, four factors


@pytest.fixture(scope="module")
def library() -> KernelLibrary:
    return built(SPECS)


@dataclass(slots=True)
class Pooled:
    """Squares of errors and of expected values, result by result."""

    errors: list[float] = field(default_factory=lambda: [0.0] * 7)
    norms: list[float] = field(default_factory=lambda: [0.0] * 7)
    count: list[int] = field(default_factory=lambda: [0] * 7)

    def add(self, found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
        for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            if ours is not None and theirs is not None:
                self.errors[place] += float((ours.double() - theirs).square().sum())
                self.norms[place] += float(theirs.square().sum())
                self.count[place] += ours.numel()

    def require_close(self, what: object, *, on_codes: bool) -> None:
        """`on_codes`: of few rows forward saved what exact codes give, and backward multiplies their rounding."""
        for place, bound in enumerate(BOUNDS):
            if self.count[place] == 0:
                continue
            found = math.sqrt(self.errors[place] / self.norms[place])
            allowed = bound * (1.25 if on_codes and place > 0 else 1)
            if place == 2 and self.count[place] < 64:  # one routing weight's gradient is a sum of products that cancel
                allowed *= 2
            assert found <= allowed, (what, place, found)


def sizes_of(spec: FusedMoeSpec) -> tuple[tuple[int, int], ...]:
    if spec.format_down != "int4":
        return SIZES
    return tuple((hidden * spec.group_size, inter * spec.group_size) for hidden, inter in GROUPS)


CASES: Final = [(spec, size) for spec in SPECS for size in sizes_of(spec)]


def matrices(layer: Layer) -> Iterator[tuple[int, ExpertPart, Tensor]]:
    for name, tensor in layer.stock.items():
        for expert in range(layer.num_experts):
            for part, values in canonical_parts(layer.form, name, tensor[expert]):
                yield expert, part, values


def module_for(library: KernelLibrary, spec: FusedMoeSpec, layer: Layer, **options: object) -> FusedMoe:
    sizes = (layer.num_experts, layer.hidden, layer.intermediate, layer.top_k)
    module = experts_of(*sizes, layer.form, kernel=library.kernel(spec.entry), **options)  # type: ignore[arg-type]
    for expert, part, values in matrices(layer):
        module.load_expert(expert, part, values)
    return module


def exact_stock(layer: Layer, spec: FusedMoeSpec, module: FusedMoe) -> Layer:
    """What forward multiplies: code x scale where an expert has few rows, except on the scalar ISA, else its rounding.

    The layer's own weights become the rounded ones, which backward multiplies.
    """
    rows = layer.index.flatten().bincount(minlength=layer.num_experts)
    exact = replace(layer, stock={name: tensor.clone() for name, tensor in layer.stock.items()})
    few = CODE_ROWS.get(spec.isa, 0) if spec.format_down != "bf16" else 0
    for (expert, part, values), (_, _, kept) in zip(matrices(layer), matrices(exact), strict=True):
        packed = module.expert(expert, part).double()
        if rows[expert] <= few:
            codes, scales = quantise(values, spec.format_down, spec.group_size)
            numbers = codes.view(torch.float8_e4m3fn) if spec.format_down == "fp8" else codes
            kept.copy_(numbers.double() * scales.double().repeat_interleave(spec.group_size, 1)[:, : values.shape[1]])
        else:
            kept.copy_(packed)
        values.copy_(packed)
    return exact


def compare(library: KernelLibrary, spec: FusedMoeSpec, adapted: Adapted, pooled: Pooled) -> None:
    layer = adapted.layer
    module = module_for(library, spec, layer)
    out = None
    if spec.format_down != "bf16":
        out = replace(adapted, layer=exact_stock(layer, spec, module)).reference()[0]
    found, expected = run_adapted(module, adapted), adapted.reference()
    present = [True, True, True, *(factor is not None for factor in adapted.lora.factors)]
    placed = [[next(each) if there else None for there in present] for each in map(iter, (found, expected))]
    if out is not None:
        placed[1][0] = out
    pooled.add(*placed)


@pytest.mark.parametrize(("spec", "size"), CASES, ids=[f"{spec.entry} {size}" for spec, size in CASES])
def test_every_shape_is_that_of_the_reference(
    library: KernelLibrary, spec: FusedMoeSpec, size: tuple[int, int]
) -> None:
    on_codes = spec.format_down != "bf16" and spec.isa in CODE_ROWS
    for number, (experts, top_k, used) in enumerate(ROUTINGS):
        rank = RANKS[(number + sum(size)) % len(RANKS)]
        few = Pooled()
        for tokens in TOKENS[: -2 if number else None]:
            layer = random_layer(*size, experts, top_k, tokens, seed=tokens, experts_used=used)
            pooled = few if tokens * min(size) < FEW_VALUES else Pooled()
            compare(library, spec, adapt(layer, rank, seed=tokens), pooled)
            if pooled is not few:
                pooled.require_close((size, experts, top_k, used, tokens, rank), on_codes=on_codes)
        few.require_close((size, experts, top_k, used, "few tokens", rank), on_codes=on_codes)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.entry)
def test_no_tokens_and_many_experts(library: KernelLibrary, spec: FusedMoeSpec) -> None:
    adapted = adapt(random_layer(*sizes_of(spec)[1], 64, 6, 0), (8, 8))
    found = run_adapted(module_for(library, spec, adapted.layer), adapted)
    assert found[0].shape == adapted.layer.x.shape
    assert all(not gradient.any() for gradient in found)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.entry)
def test_threads_change_no_bit(library: KernelLibrary, spec: FusedMoeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "usable_threads", lambda: 8)
    for tokens in (3, 45, 130):
        adapted = adapt(random_layer(*sizes_of(spec)[-1], 6, 3, tokens), (8, 33))
        alone = run_adapted(module_for(library, spec, adapted.layer), adapted)
        for threads in (2, 3, 5):
            found = run_adapted(module_for(library, spec, adapted.layer, threads=threads), adapted)
            assert all(map(torch.equal, found, alone)), (tokens, threads)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.entry)
def test_a_non_finite_token_stays_so_and_touches_no_other(
    library: KernelLibrary, spec: FusedMoeSpec, value: float
) -> None:
    layer = random_layer(*sizes_of(spec)[-1], 5, 2, 29)
    module = module_for(library, spec, layer)
    x = layer.x.clone()
    x[7, 3] = value
    clean, spoilt = adapt(layer, (0, 0)), adapt(replace(layer, x=x), (0, 0))
    others = torch.arange(29) != 7
    for ours, theirs, finite in zip(
        run_adapted(module, spoilt), spoilt.reference(), run_adapted(module, clean), strict=True
    ):
        assert torch.equal(ours[7].isfinite(), theirs[7].isfinite())
        assert torch.equal(ours[7].isnan(), theirs[7].isnan())
        assert torch.equal(ours[others], finite[others])

"""Kernels on quantised weights: what they pack, what they compute, and what may be packed as it is stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from kernel_layers import CODE_ROWS, ISAS, Layer, built, error, experts_of, quick_or_slow, random_layer, run, spec_of
from lora_layers import adapt, assert_close, run_adapted
from refresh_cycle import assert_cycle
from torch import Tensor

from ktc.foundation import host
from ktc.foundation.formats import CODES
from ktc.foundation.isa import Isa
from ktc.model.experts.layouts.stock_layout import ExpertPart, canonical_parts
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.references.quantised_reference import dequantise, quantise
from ktc.model.kernels.form import ExpertsForm
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.model.kernels.kernel_library import KernelLibrary
from ktc.model.kernels.packed_size import packed_bytes

# Every instruction set, and every size of groups on one of them.
GROUPS: dict[Isa, int] = {"scalar": 32, "avx2": 128, "avx512": 64, "avx512_bf16": 32, "amx": 32}
INT4 = {f"int4 {GROUPS[isa]} {isa}": spec_of(isa, codes=("int4", GROUPS[isa])) for isa in ISAS}
BIASED = spec_of(ISAS[0], form="relu2 ungated biased", codes=("int4", 128))
FP8 = {f"fp8 {isa}": spec_of(isa, codes=("fp8", 128)) for isa in ("avx512_bf16", "avx2", "scalar") if isa in ISAS}
SPECS = {**INT4, "int4 128 relu2 ungated biased": BIASED, **FP8}
# Both formats with the best instruction set, and each with a lesser one.
QUICK = {next(iter(INT4)), "int4 128 avx2", "fp8 avx512_bf16", "fp8 scalar"}
# Hidden and intermediate in groups, experts, experts per token, tokens, and how many experts get any.
SHAPES = {
    "no tokens": (2, 1, 4, 2, 0, 4),
    "one token": (3, 5, 8, 3, 1, 8),
    "three tokens": (5, 3, 8, 2, 3, 8),
    "empty experts": (4, 3, 32, 2, 7, 32),
    "seventeen tokens": (4, 7, 2, 2, 17, 2),
    "two experts get all": (3, 2, 16, 2, 65, 2),
    "one expert": (1, 1, 1, 1, 65, 1),
}


@pytest.fixture
def library(request: pytest.FixtureRequest) -> KernelLibrary:
    slow = request.node.get_closest_marker("slow")
    return built(tuple(spec for name, spec in SPECS.items() if slow or name in QUICK))


@pytest.fixture(params=[quick_or_slow(spec, name in QUICK, id=name) for name, spec in SPECS.items()])
def spec(request: pytest.FixtureRequest) -> FusedMoeSpec:
    return request.param


def layer_for(spec: FusedMoeSpec, shape: tuple[int, ...]) -> Layer:
    hidden, inter, experts, top_k, tokens, used = shape
    group = spec.group_size if spec.format_down == "int4" else 45  # others take any size
    form = str(ExpertsForm(spec.activation, spec.gated, spec.biased))
    return random_layer(hidden * group, inter * group, experts, top_k, tokens, experts_used=used, form=form)


def matrices(layer: Layer) -> Iterator[tuple[int, ExpertPart, Tensor]]:
    for name, tensor in layer.stock.items():
        for expert in range(layer.num_experts):
            for part, values in canonical_parts(layer.form, name, tensor[expert]):
                yield expert, part, values


def module_for(library: KernelLibrary, spec: FusedMoeSpec, layer: Layer, **options: object) -> FusedMoe:
    sizes = (layer.num_experts, layer.hidden, layer.intermediate, layer.top_k)
    module = experts_of(*sizes, layer.form, kernel=library.kernel(spec.entry), **options)  # type: ignore[arg-type]
    fill(module, layer)
    return module


def fill(module: FusedMoe, layer: Layer) -> None:
    for expert, part, values in matrices(layer):
        module.load_expert(expert, part, values)


def expected_of(layer: Layer, spec: FusedMoeSpec, module: FusedMoe) -> tuple[Tensor, Tensor, Tensor]:
    """Output and gradients of what the module multiplies; the layer's weights become the rounded ones."""
    fewest = layer.index.numel() and int(layer.index.flatten().bincount().max()) <= CODE_ROWS.get(spec.isa, 0)
    quantised = [
        (values, *quantise(values, spec.format_down, spec.group_size), module.expert(expert, part))
        for expert, part, values in matrices(layer)
        if not part.endswith("_bias")
    ]
    for values, codes, scales, packed in quantised:
        assert torch.equal(packed, dequantise(codes, scales, spec.group_size))
        numbers = codes.view(torch.float8_e4m3fn) if spec.format_down == "fp8" else codes
        of_weight = scales.repeat_interleave(spec.group_size or values.shape[1], 1)[:, : values.shape[1]]
        values.copy_(numbers.double() * of_weight.double())
    exact, _, _ = layer.expected()
    for values, _, _, packed in quantised:
        values.copy_(packed)
    out, d_x, d_weights = layer.expected()
    return (exact if fewest else out), d_x, d_weights


def test_weights_are_replaced_where_they_are(library: KernelLibrary, spec: FusedMoeSpec) -> None:
    layer = layer_for(spec, SHAPES["three tokens"])
    module = module_for(library, spec, layer)
    packed = module.weights.packed
    assert packed is not None
    assert_cycle(module, lambda: fill(module, layer), lambda: run(module, layer)[0], packed.packed.data_ptr)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_output_and_gradients_are_those_of_the_quantised_weights(
    library: KernelLibrary, spec: FusedMoeSpec, shape: tuple[int, ...]
) -> None:
    layer = layer_for(spec, shape)
    module = module_for(library, spec, layer)
    out, d_x, d_weights = run(module, layer)
    assert out.shape == d_x.shape == layer.x.shape
    if layer.x.shape[0]:
        expected_out, expected_d_x, expected_d_weights = expected_of(layer, spec, module)
        assert error(out, expected_out) <= 3e-3
        assert error(d_x, expected_d_x) <= 4e-3
        # A single one is a sum of products that cancel; of several the errors average out.
        assert error(d_weights, expected_d_weights) <= (5e-3 if d_weights.numel() >= 16 else 1e-2)


def test_experts_with_few_and_many_rows_side_by_side(library: KernelLibrary, spec: FusedMoeSpec) -> None:
    layer = layer_for(spec, (4, 3, 6, 2, 18, 6))
    module = module_for(library, spec, layer)
    for found, expected in zip(run(module, layer), expected_of(layer, spec, module), strict=True):
        assert error(found, expected) <= 5e-3  # of two roundings of the same weights one is not the kernel's


def test_results_are_bit_identical_however_they_are_computed(
    library: KernelLibrary, spec: FusedMoeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "usable_threads", lambda: 8)
    layer = layer_for(spec, (5, 4, 6, 3, 45, 6))
    alone = run(module_for(library, spec, layer), layer)
    for options in ({"threads": 2}, {"threads": 3}, {"threads": 4}, {"activations": "recompute"}):
        assert all(map(torch.equal, run(module_for(library, spec, layer, **options), layer), alone)), options


def test_codes_are_packed_as_they_are_stored(library: KernelLibrary, spec: FusedMoeSpec) -> None:
    layer = layer_for(spec, (2, 3, 2, 1, 1, 2))
    module = module_for(library, spec, layer)
    generator = torch.Generator().manual_seed(4)
    for part in ("up", "down"):
        assert module.weights.takes_codes(part, spec.format_down, spec.group_size)
        assert not module.weights.takes_codes(part, spec.format_down, spec.group_size + 32)
    for expert, part, values in matrices(layer):
        if part.endswith("_bias"):
            continue
        low, high = {"int4": (-8, 8), "int8": (-128, 128), "fp8": (0, 127)}[spec.format_down]
        kind = torch.uint8 if spec.format_down == "fp8" else torch.int8
        codes = torch.randint(low, high, values.shape, generator=generator, dtype=kind)
        groups = -(-values.shape[1] // (spec.group_size or values.shape[1]))
        scales = torch.rand(values.shape[0], groups, generator=generator).bfloat16().float()
        module.weights.load_codes(expert, part, codes, scales)
        assert torch.equal(module.expert(expert, part), dequantise(codes, scales, spec.group_size))


def test_what_the_format_cannot_hold_is_refused(library: KernelLibrary) -> None:
    spec = SPECS[next(iter(SPECS))]
    layer = layer_for(spec, (2, 1, 1, 1, 1, 1))
    module = module_for(library, spec, layer)
    codes = torch.zeros(layer.intermediate, layer.hidden, dtype=torch.int8)
    scales = torch.ones(layer.intermediate, 2)
    with pytest.raises(ValueError, match="a scale is not exact"):
        module.weights.load_codes(0, "up", codes, scales + 1e-6)
    with pytest.raises(ValueError, match="an int4 code must be -8 to 7"):
        module.weights.load_codes(0, "up", codes + 8, scales)
    with pytest.raises(ValueError, match="expected scales of"):
        module.weights.load_codes(0, "up", codes, scales[:, :1])
    with pytest.raises(ValueError, match="expected shape"):
        module.weights.load_codes(0, "up", codes[:, :32], scales)
    with pytest.raises(ValueError, match="not finite"):
        module.load_expert(0, "up", torch.full((layer.intermediate, layer.hidden), torch.inf))


@pytest.mark.parametrize("name", ["hidden", "intermediate"])
def test_rows_that_are_no_whole_groups_are_refused_by_name(library: KernelLibrary, name: str) -> None:
    int4 = SPECS[next(iter(INT4))]  # in every library, on each processor
    kernel, group = library.kernel(int4.entry), int4.group_size
    sizes = {"hidden": 2 * group, "intermediate": 2 * group, name: group + 8}
    with pytest.raises(ValueError, match=f"int4 weights in groups of {group}: {name} = {group + 8}"):
        experts_of(2, sizes["hidden"], sizes["intermediate"], 1, kernel=kernel)


def test_the_plan_knows_the_packed_bytes(library: KernelLibrary, spec: FusedMoeSpec) -> None:
    layer = layer_for(spec, (2, 3, 4, 2, 1, 4))
    sizes = {"hidden": layer.hidden, "intermediate": layer.intermediate, "num_experts": 4, "top_k": 2}
    assert module_for(library, spec, layer).packed_bytes == packed_bytes(replace(spec, **sizes))


def test_quantising_what_was_quantised_changes_nothing() -> None:
    weights = torch.randn(64, 256, generator=torch.Generator().manual_seed(2))
    for group in CODES["int4"].group_sizes:
        codes, scales = quantise(weights, "int4", group)
        again = quantise(dequantise(codes, scales, group), "int4", group)
        assert torch.equal(again[0], codes)
        assert torch.equal(again[1], scales)


@pytest.mark.parametrize(
    ("tokens", "dropout"), [(5, 0.0), (65, 0.0), (65, 0.5)], ids=["few rows", "many rows", "dropout"]
)
def test_lora_on_quantised_weights(library: KernelLibrary, spec: FusedMoeSpec, tokens: int, dropout: float) -> None:
    layer = layer_for(spec, (2, 3, 4, 2, tokens, 4))
    module = module_for(library, spec, layer)
    for expert, part, values in matrices(layer):
        values.copy_(module.expert(expert, part))
    adapted = adapt(layer, (8, 5), selecting=not spec.gated, dropout=dropout)
    # of few rows the codes themselves are multiplied, which is the more exact of two roundings
    assert_close(run_adapted(module, adapted), adapted.reference(), 1 if tokens > 4 * max(CODE_ROWS.values()) else 2)
    for options in ({"threads": 3}, {"activations": "recompute"}):
        again = run_adapted(module_for(library, spec, layer, **options), adapted)
        assert all(map(torch.equal, again, run_adapted(module, adapted))), options

"""Products in integers (`int8`): what a kernel computes beside an emulation of the same arithmetic in float64, beside
the layer as it was, and what holds to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from kernel_layers import ISAS, Layer, built, error, experts_of, random_layer, run, spec_of
from torch import Tensor

from ktc.foundation import host
from ktc.foundation.isa import Isa
from ktc.model.experts.layouts.stock_layout import ExpertPart, canonical_parts
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.references.quantised_reference import (
    INT8_BACKWARD,
    INT8_FORWARD,
    dequantise,
    quantise,
    quantise_rows,
)
from ktc.model.experts.references.reference import Products, fused_moe_reference
from ktc.model.experts.trained.lora import ExpertsLora, Lora
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.model.kernels.kernel_library import KernelLibrary
from ktc.model.kernels.packed_size import packed_bytes

GATED = {isa: spec_of(isa, codes=("int8", 0)) for isa in ISAS}
BIASED = spec_of(ISAS[0], form="relu2 ungated biased", codes=("int8", 0))
SPECS = (*GATED.values(), BIASED)
# Hidden, intermediate, experts, experts per token, tokens, and how many experts get any.
SHAPES = {
    "no tokens": (64, 32, 4, 2, 0, 4),
    "one token": (130, 50, 16, 4, 1, 16),
    "odd sizes": (70, 37, 5, 2, 29, 5),
    "below a panel": (17, 9, 6, 3, 50, 6),
    "one expert": (48, 33, 1, 1, 31, 1),
    "every expert": (33, 65, 4, 4, 13, 4),
    "two experts get all": (96, 160, 16, 2, 150, 2),
    "deep": (1100, 600, 3, 2, 25, 3),
}
Make = Callable[..., FusedMoe]


@pytest.fixture(scope="module")
def library() -> KernelLibrary:
    return built(SPECS)


@pytest.fixture(scope="module")
def make(library: KernelLibrary) -> Make:
    def module_of(layer: Layer, spec: FusedMoeSpec, **options: object) -> FusedMoe:
        sizes = (layer.num_experts, layer.hidden, layer.intermediate, layer.top_k)
        module = experts_of(*sizes, layer.form, kernel=library.kernel(spec.entry), **options)  # type: ignore[arg-type]
        for expert, part, values in matrices(layer):
            module.load_expert(expert, part, values)
        return module

    return module_of


def layer_of(shape: tuple[int, ...], spec: FusedMoeSpec = GATED[ISAS[0]]) -> Layer:
    form = "relu2 ungated biased" if spec is BIASED else "silu"
    return random_layer(*shape[:5], experts_used=shape[5], form=form)


def matrices(layer: Layer) -> Iterator[tuple[int, ExpertPart, Tensor]]:
    for name, tensor in layer.stock.items():
        for expert in range(layer.num_experts):
            for part, values in canonical_parts(layer.form, name, tensor[expert]):
                yield expert, part, values


def emulated(layer: Layer, lora: ExpertsLora | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Output, rounded as a kernel rounds it, and gradients of hidden states and routing weights."""

    def computed(x: Tensor, weights: Tensor, products: Products) -> Tensor:
        stock = [*layer.stock.values()]
        return fused_moe_reference(x, layer.index, weights, stock, layer.form, lora=lora, products=products)

    out = computed(layer.x, layer.weights, INT8_FORWARD).bfloat16()
    x, weights = layer.x.clone().requires_grad_(), layer.weights.clone().requires_grad_()
    d_x, d_weights = torch.autograd.grad(computed(x, weights, INT8_BACKWARD), (x, weights), layer.grad)
    return out, d_x, d_weights


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.entry[17:])
def test_output_and_gradients_are_those_of_the_emulation(
    make: Make, spec: FusedMoeSpec, shape: tuple[int, ...]
) -> None:
    layer = layer_of(shape, spec)
    out, d_x, d_weights = run(make(layer, spec), layer)
    assert out.shape == d_x.shape == layer.x.shape
    if layer.x.shape[0]:
        expected_out, expected_d_x, expected_d_weights = emulated(layer)
        assert error(out, expected_out.double()) <= 1e-3
        assert error(d_x, expected_d_x) <= 4e-3
        assert error(d_weights, expected_d_weights) <= (5e-3 if d_weights.numel() >= 16 else 1e-2)


@pytest.mark.parametrize("isa", ISAS)
def test_quantising_weights_and_rows_costs_little(make: Make, isa: Isa) -> None:
    layer = layer_of(SHAPES["deep"])
    out, d_x, d_weights = run(make(layer, GATED[isa]), layer)
    for found, expected in zip((out, d_x, d_weights), layer.expected(), strict=True):
        assert error(found, expected) <= 3.5e-2


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.entry[17:])
def test_results_are_bit_identical_however_they_are_computed(
    make: Make, spec: FusedMoeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "usable_threads", lambda: 4)
    layer = layer_of((225, 180, 6, 3, 45, 6), spec)
    alone = run(make(layer, spec), layer)
    for options in ({"threads": 2}, {"threads": 3}, {"activations": "recompute"}):
        assert all(map(torch.equal, run(make(layer, spec, **options), layer), alone)), options


@pytest.mark.parametrize("isa", ISAS)
def test_a_token_gets_the_same_alone_and_among_others(make: Make, isa: Isa) -> None:
    """Integer sums are exact: not even the tiles of AMX, which compute the many, give another bit."""
    layer = layer_of(SHAPES["two experts get all"])
    module = make(layer, GATED[isa])
    batch = (layer.x.bfloat16(), layer.index, layer.weights)
    together = module(*batch)
    for token in (0, 13, 149):
        assert torch.equal(module(*(part[token : token + 1] for part in batch))[0], together[token])


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_of_zeros_gives_zeros_and_the_tiniest_count_as_such(make: Make, isa: Isa) -> None:
    layer = layer_of(SHAPES["odd sizes"])
    layer.x[3] = 0
    layer.x[5] *= 2.0**-120
    out, _, _ = run(make(layer, GATED[isa]), layer)
    assert not out[3].any()
    assert not out[5].any()
    assert error(out, emulated(layer)[0].double()) <= 1e-3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("isa", ISAS)
def test_a_row_that_is_not_finite_becomes_nan_and_touches_no_other(make: Make, isa: Isa, value: float) -> None:
    layer = layer_of(SHAPES["odd sizes"])
    module = make(layer, GATED[isa])
    clean = run(module, layer)
    layer.x[7, 3] = value
    out, d_x, d_weights = run(module, layer)
    assert out[7].isnan().all()
    assert d_x[7].isnan().all()
    assert d_weights[7].isnan().all()
    others = torch.arange(29) != 7
    for found, before in zip((out, d_x, d_weights), clean, strict=True):
        assert torch.equal(found[others], before[others])


@pytest.mark.parametrize("isa", ISAS)
def test_activations_that_overflow_are_nan_as_in_the_emulation(make: Make, isa: Isa) -> None:
    layer = layer_of(SHAPES["odd sizes"])
    layer.x[2] *= 1e30
    out, _, _ = run(make(layer, GATED[isa]), layer)
    expected = emulated(replace(layer, x=layer.x.float().double()))[0]
    assert out[2].isnan().all()
    others = torch.arange(29) != 2
    assert error(out[others], expected[others].double()) <= 1e-3


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("ranks", [(8, 8), (5, 0), (0, 33)])
@pytest.mark.parametrize("isa", ISAS)
def test_lora_reads_the_rows_as_they_were(make: Make, isa: Isa, ranks: tuple[int, int], activations: str) -> None:
    layer = layer_of(SHAPES["odd sizes"])
    generator = torch.Generator().manual_seed(3)

    def lora(rank: int, inputs: int, outputs: int) -> Lora | None:
        a = torch.randn(layer.num_experts, rank, inputs, generator=generator).mul(inputs**-0.5).bfloat16()
        b = torch.randn(layer.num_experts, outputs, rank, generator=generator).mul(0.3 * rank**-0.5 if rank else 1)
        return Lora(a.double(), b.bfloat16().double(), scale=0.75) if rank else None

    sizes = (layer.hidden, layer.intermediate)
    exact = ExpertsLora(lora(ranks[0], sizes[0], 2 * sizes[1]), lora(ranks[1], sizes[1], sizes[0]))
    leaves = ExpertsLora(
        *(
            each and replace(each, a=each.a.float().requires_grad_(), b=each.b.float().requires_grad_())
            for each in exact.products
        )
    )
    factors = [each for each in leaves.factors if each is not None]
    x, weights = layer.x.bfloat16().requires_grad_(), layer.weights.float().requires_grad_()
    out = make(layer, GATED[isa], activations=activations)(x, layer.index, weights, leaves)
    found = torch.autograd.grad(out, (x, weights, *factors), layer.grad.bfloat16())

    first, down = layer.stock.values()
    reference = [each.detach().double().requires_grad_() for each in (x, weights)]
    for each in exact.factors:
        if each is not None:
            each.requires_grad_()
    of_factors = [each for each in exact.factors if each is not None]

    def computed(products: Products) -> Tensor:
        stock = (reference[0], layer.index, reference[1], (first, down), layer.form)
        return fused_moe_reference(*stock, lora=exact, products=products)

    assert error(out.detach(), computed(INT8_FORWARD).detach()) <= 4e-3  # low-rank values are rounded to bf16
    expected = torch.autograd.grad(computed(INT8_BACKWARD), (*reference, *of_factors), layer.grad)
    for ours, theirs in zip(found, expected, strict=True):
        assert error(ours, theirs) <= 6e-3


def test_codes_are_packed_as_they_are_stored(make: Make) -> None:
    layer = layer_of((70, 37, 2, 1, 9, 2))
    module = make(layer, GATED[ISAS[0]])
    generator = torch.Generator().manual_seed(4)
    assert module.weights.takes_codes("up", "int8", 0)
    assert not module.weights.takes_codes("up", "int8", 32)
    for expert, part, values in matrices(layer):
        codes = torch.randint(-128, 128, values.shape, generator=generator, dtype=torch.int8)
        scales = torch.rand(values.shape[0], 1, generator=generator) * 0.01
        module.weights.load_codes(expert, part, codes, scales)
        assert torch.equal(module.expert(expert, part), dequantise(codes, scales, 0))
        codes, scales = quantise(values, "int8", 0)
        module.weights.load_codes(expert, part, codes, scales)
    assert all(map(torch.equal, run(module, layer), run(make(layer, GATED[ISAS[0]]), layer)))


def test_rows_whose_sums_could_overflow_are_refused(library: KernelLibrary) -> None:
    kernel = library.kernel(GATED[ISAS[0]].entry)
    with pytest.raises(ValueError, match=r"int8 products: intermediate = 65537 is more than 65536"):
        experts_of(1, 32, 65537, 1, kernel=kernel)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.entry[17:])
def test_the_plan_knows_the_packed_bytes(make: Make, spec: FusedMoeSpec) -> None:
    layer = layer_of((70, 37, 4, 2, 1, 4), spec)
    sizes = {"hidden": 70, "intermediate": 37, "num_experts": 4, "top_k": 2}
    assert make(layer, spec).packed_bytes == packed_bytes(replace(spec, **sizes))


def test_rows_are_quantised_to_the_scale_of_their_largest() -> None:
    rows = torch.tensor([[1.0, -2.0, 0.5, 0.0], [0.0] * 4, [float("inf"), 1, 2, 3], [2.0**-101] * 4])
    codes, scales = quantise_rows(rows)
    assert codes.tolist() == [[64, -127, 32, 0], [0] * 4, [0] * 4, [0] * 4]
    assert scales[:, 0].tolist()[:2] == [torch.tensor(2 / 127).item(), 0.0]
    assert scales[2].isnan().all()
    assert scales[3] == 0


@pytest.mark.parametrize("exponent", [-20, -100])
def test_small_rows_keep_their_values(exponent: int) -> None:
    row = torch.tensor([[0.3, -1.0, 0.5, 0.0]])
    codes, scales = quantise_rows(row)
    small_codes, small_scales = quantise_rows(row * 2.0**exponent)
    assert codes.any()
    assert torch.equal(small_codes, codes)
    assert torch.equal(small_scales, scales * 2.0**exponent)

"""LoRA on experts: outputs and gradients of the kernels against the reference in float64, and what holds exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_layers import EXACT, EXACT_FORMS, FORMS, ISAS, Load, error, isas_with, random_layer, spec_of
from lora_layers import adapt, assert_close, run_adapted, trained
from torch import Tensor

from ktc.foundation import host
from ktc.foundation.isa import Isa
from ktc.model.experts.trained.lora import ExpertsLora, Lora

# Hidden, intermediate, experts, experts per token, tokens, and how many experts get any.
SHAPES = {
    "panels": (64, 96, 8, 2, 40, 8),
    "odd sizes": (70, 37, 5, 2, 29, 5),
    "below a panel": (17, 9, 6, 3, 50, 6),
    "one expert": (48, 33, 1, 1, 31, 1),
    "one token": (130, 50, 16, 4, 1, 16),
    "empty experts": (96, 64, 32, 2, 7, 3),
}
RANKS = (1, 8, 33)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("isa", ISAS)
def test_outputs_and_gradients_are_those_of_the_reference(
    load: Load, isa: Isa, shape: tuple[int, ...], rank: int
) -> None:
    adapted = adapt(random_layer(*shape[:5], seed=2, experts_used=shape[5]), rank)
    assert_close(run_adapted(load(adapted.layer, spec_of(isa)), adapted), adapted.reference())


@pytest.mark.parametrize(("isa", "form"), isas_with(*FORMS[1:]))
def test_experts_of_any_form_are_those_of_the_reference(load: Load, isa: Isa, form: str) -> None:
    # a rounded gate may lie on the other side of a limit or of zero, where the gradient jumps
    adapted = adapt(random_layer(70, 37, 5, 2, 29, form=form), 5, selecting=True)
    assert_close(run_adapted(load(adapted.layer, spec_of(isa, form=form)), adapted), adapted.reference())


@pytest.mark.parametrize("ranks", [(8, 0), (0, 8), (3, 40), (128, 128)])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_products_are_adapted_each_by_its_own_rank_or_not_at_all(
    load: Load, ranks: tuple[int, int], activations: str
) -> None:
    adapted = adapt(random_layer(70, 37, 5, 2, 29), ranks)
    module = load(adapted.layer, spec_of(ISAS[0]), activations=activations)
    assert_close(run_adapted(module, adapted), adapted.reference())


@pytest.mark.parametrize("form", EXACT_FORMS)
def test_the_scalar_oracle_is_exact_in_float64(load: Load, form: str) -> None:
    adapted = adapt(random_layer(70, 37, 5, 2, 29, form=form), (3, 9))
    found = run_adapted(load(adapted.layer, spec_of("scalar", "fp64", form)), adapted, torch.float64)
    for ours, theirs in zip(found, adapted.reference(), strict=True):
        assert error(ours, theirs) <= 1e-14


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("form", EXACT)
def test_gradcheck_in_float64(load: Load, form: str, activations: str) -> None:
    adapted = adapt(random_layer(9, 7, 4, 2, 6, form=form), (2, 3))
    module, layer = load(adapted.layer, spec_of("scalar", "fp64", form), activations=activations), adapted.layer
    x, weights, lora = trained(adapted, torch.float64, torch.float64)

    def call(x: Tensor, weights: Tensor, *factors: Tensor) -> Tensor:
        first, down = Lora(factors[0], factors[1], 0.75), Lora(factors[2], factors[3], 0.5)
        return module(x, layer.index, weights, ExpertsLora(first, down))

    assert torch.autograd.gradcheck(call, (x, weights, *lora.factors))  # type: ignore[arg-type]


@pytest.mark.parametrize("isa", ISAS)
def test_every_way_to_run_gives_the_same_bits(load: Load, isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "usable_threads", lambda: 8)
    adapted = adapt(random_layer(200, 150, 6, 3, 45), (8, 33))
    alone = run_adapted(load(adapted.layer, spec_of(isa)), adapted)
    for options in ({"threads": 2}, {"threads": 3}, {"threads": 5}, {"activations": "recompute"}):
        found = run_adapted(load(adapted.layer, spec_of(isa), **options), adapted)
        assert all(map(torch.equal, found, alone)), options


def test_experts_without_tokens_have_zero_gradients_and_none_is_missing(load: Load) -> None:
    adapted = adapt(random_layer(64, 48, 8, 2, 9, experts_used=3), 4)
    for spec in (spec_of(ISAS[0]), None):
        module = load(adapted.layer, spec, **({} if spec else {"dtype": torch.float32}))
        gradients = run_adapted(module, adapted, torch.bfloat16 if spec else torch.float32)[3:]
        assert len(gradients) == 4
        for gradient in gradients:
            assert gradient.dtype == torch.float32
            assert gradient[3:].eq(0).all()
            assert gradient[:3].ne(0).any()


def test_without_effect_nothing_changes(load: Load) -> None:
    adapted = adapt(random_layer(70, 37, 5, 2, 29), 8)
    products = (each and replace(each, b=torch.zeros_like(each.b)) for each in adapted.lora.products)
    module, layer = load(adapted.layer, spec_of(ISAS[0])), adapted.layer
    inputs = (layer.x.bfloat16(), layer.index, layer.weights.float())
    assert torch.equal(module(*inputs, ExpertsLora(*products)), module(*inputs))


def test_only_the_factors_are_trained(load: Load) -> None:
    adapted = adapt(random_layer(64, 48, 4, 2, 9), 4)
    module = load(adapted.layer, spec_of(ISAS[0]))
    everything = run_adapted(module, adapted)
    _, _, lora = trained(adapted, torch.bfloat16, torch.float32)
    out = module(adapted.layer.x.bfloat16(), adapted.layer.index, adapted.layer.weights.float(), lora)
    alone = torch.autograd.grad(out, lora.factors, adapted.layer.grad.bfloat16())  # type: ignore[arg-type]
    assert all(map(torch.equal, alone, everything[3:]))


def test_no_tokens_give_zero_gradients(load: Load) -> None:
    adapted = adapt(random_layer(64, 48, 4, 2, 0), 4)
    found = run_adapted(load(adapted.layer, spec_of(ISAS[0])), adapted)
    assert all(gradient.eq(0).all() for gradient in found[3:])


@pytest.mark.parametrize("isa", ISAS)
def test_a_non_finite_token_stays_so_and_touches_no_other(load: Load, isa: Isa) -> None:
    clean = adapt(random_layer(70, 37, 5, 2, 29), 8)
    x = clean.layer.x.clone()
    x[7, 3] = float("inf")
    adapted = replace(clean, layer=replace(clean.layer, x=x))
    module = load(clean.layer, spec_of(isa))
    found, finite, expected = run_adapted(module, adapted), run_adapted(module, clean), adapted.reference()
    others = torch.arange(29) != 7
    for ours, theirs, before in zip(found[:3], expected[:3], finite[:3], strict=True):
        assert torch.equal(ours[7].isfinite(), theirs[7].isfinite())
        assert torch.equal(ours[others], before[others])


def test_factors_of_another_shape_or_too_high_a_rank_are_refused(load: Load) -> None:
    layer = random_layer(64, 48, 4, 2, 9)
    module = load(layer, spec_of(ISAS[0]))
    inputs = (layer.x, layer.index, layer.weights)
    good = adapt(layer, 4).lora
    assert good.down is not None
    with pytest.raises(ValueError, match=r"LoRA on `gate_up_proj`: expected factors of shapes"):
        module(*inputs, ExpertsLora(gate_up=good.down))
    with pytest.raises(ValueError, match=r"LoRA on `down_proj`: expected a rank from 1 to 128, found 129"):
        module(*inputs, adapt(layer, (0, 129)).lora)


def test_a_merged_sum_is_the_same_under_autocast() -> None:
    generator = torch.Generator().manual_seed(0)
    factors = Lora(torch.randn(2, 4, 24, generator=generator), torch.randn(2, 40, 4, generator=generator), 0.5)
    plain = factors.delta(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(factors.delta(1), plain)
    assert plain.dtype == torch.float32

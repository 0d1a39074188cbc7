"""Kernels against the reference in float64, and the properties that hold to the last bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_layers import CONSTANT, EXACT_FORMS, FORMS, ISAS, Layer, Load, error, isas_with, random_layer, run, spec_of

from ktc.foundation import host
from ktc.foundation.isa import Isa
from ktc.model.experts.layouts.stock_layout import canonical_parts

# Hidden, intermediate, experts, experts per token, tokens, and how many experts get any.
SHAPES = {
    "panels": (64, 96, 8, 2, 40, 8),
    "odd sizes": (70, 37, 5, 2, 29, 5),
    "below a panel": (17, 9, 6, 3, 50, 6),
    "one expert": (48, 33, 1, 1, 31, 1),
    "every expert": (33, 65, 4, 4, 13, 4),
    "one token": (130, 50, 16, 4, 1, 16),
    "empty experts": (96, 64, 32, 2, 7, 32),
    "two experts get all": (64, 40, 16, 2, 150, 2),
    "one expert gets all": (40, 24, 16, 1, 300, 1),
    "many tokens": (33, 17, 8, 2, 4097, 8),
    "deep": (1100, 600, 3, 2, 25, 3),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("isa", ISAS)
def test_output_and_gradients_are_those_of_the_reference(load: Load, isa: Isa, shape: tuple[int, ...]) -> None:
    layer = random_layer(*shape[:5], experts_used=shape[5])
    out, d_x, d_weights = run(load(layer, spec_of(isa)), layer)
    expected_out, expected_d_x, expected_d_weights = layer.expected()
    assert error(out, expected_out) <= 3e-3
    assert error(d_x, expected_d_x) <= 4e-3
    assert error(d_weights, expected_d_weights) <= 5e-3


@pytest.mark.parametrize("shape", ["odd sizes", "one token", "two experts get all"])
@pytest.mark.parametrize(("isa", "form"), isas_with(*FORMS[1:]))
def test_experts_of_any_form_are_those_of_the_reference(load: Load, isa: Isa, form: str, shape: str) -> None:
    *sizes, experts_used = SHAPES[shape]
    layer = random_layer(*sizes, experts_used=experts_used, form=form)
    out, d_x, d_weights = run(load(layer, spec_of(isa, form=form)), layer)
    expected_out, expected_d_x, expected_d_weights = layer.expected()
    assert error(out, expected_out) <= 3e-3
    assert error(d_x, expected_d_x) <= 4e-3
    assert error(d_weights, expected_d_weights) <= 5e-3


@pytest.mark.parametrize("form", EXACT_FORMS)
def test_the_scalar_oracle_is_exact_in_float64(load: Load, form: str) -> None:
    layer = random_layer(70, 37, 5, 2, 29, form=form)
    module = load(layer, spec_of("scalar", "fp64", form))
    for ours, theirs in zip(run(module, layer, torch.float64), layer.expected(), strict=True):
        assert error(ours, theirs) <= 1e-14


def test_the_scalar_oracle_is_exact_in_float32(load: Load) -> None:
    layer = random_layer(70, 37, 5, 2, 29, form="gelu")
    module = load(layer, spec_of("scalar", "fp32", "gelu"))
    for ours, theirs in zip(run(module, layer, torch.float32), layer.expected(), strict=True):
        assert error(ours, theirs) <= 1e-6


@pytest.mark.parametrize(("isa", "form"), isas_with(FORMS[1], FORMS[-1]))
def test_every_way_to_run_a_form_gives_the_same_bits(
    load: Load, isa: Isa, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "usable_threads", lambda: 8)
    layer = random_layer(200, 150, 6, 3, 45, form=form)
    alone = run(load(layer, spec_of(isa, form=form)), layer)
    for options in ({"threads": 2}, {"threads": 3}, {"activations": "recompute"}):
        assert all(map(torch.equal, run(load(layer, spec_of(isa, form=form), **options), layer), alone)), options


def test_constant_sizes_change_no_bit(load: Load) -> None:
    layer = random_layer(*CONSTANT, tokens=37)
    dynamic = run(load(layer, spec_of(ISAS[0])), layer)
    constant = run(load(layer, spec_of(ISAS[0], sizes=CONSTANT)), layer)
    assert all(map(torch.equal, constant, dynamic))


def test_other_sizes_than_the_constant_ones_are_refused(load: Load) -> None:
    with pytest.raises(ValueError, match="built for hidden = 70, found 64"):
        load(random_layer(64, 37, 5, 2, 1), spec_of(ISAS[0], sizes=CONSTANT))


@pytest.mark.parametrize("isa", ISAS)
def test_results_are_bit_identical_for_any_number_of_threads(
    load: Load, isa: Isa, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "usable_threads", lambda: 8)
    layer = random_layer(200, 150, 6, 3, 45)
    alone = run(load(layer, spec_of(isa), threads=1), layer)
    for threads in (2, 3, 5):
        assert all(map(torch.equal, run(load(layer, spec_of(isa), threads=threads), layer), alone)), threads


def test_more_threads_than_columns_do_no_harm(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "usable_threads", lambda: 8)
    layer = random_layer(17, 9, 3, 2, 2)
    alone = run(load(layer, spec_of(ISAS[0]), threads=1), layer)
    assert all(map(torch.equal, run(load(layer, spec_of(ISAS[0]), threads=7), layer), alone))


def test_threads_beyond_the_cores_are_not_started(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "usable_threads", lambda: 1)
    with pytest.warns(UserWarning, match="needs 3 kernel threads; this process may use 1"):
        load(random_layer(17, 9, 3, 2, 2), spec_of(ISAS[0]), threads=3)


# On AMX an expert with few tokens is computed by other instructions than one with many, which round in another order.
@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "amx"])
def test_a_token_gets_the_same_alone_and_among_others(load: Load, isa: Isa) -> None:
    layer = random_layer(70, 37, 5, 2, 29)
    module = load(layer, spec_of(isa))
    together = module(layer.x.bfloat16(), layer.index, layer.weights)
    for token in (0, 13, 28):
        alone = module(*(part[token : token + 1] for part in (layer.x.bfloat16(), layer.index, layer.weights)))
        assert torch.equal(alone[0], together[token])


@pytest.mark.parametrize("isa", ISAS)
def test_the_order_of_the_experts_does_not_matter(load: Load, isa: Isa) -> None:
    layer = random_layer(64, 48, 6, 1, 40)  # one expert per token: the order of a sum would show in the last bit
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    stock = {name: tensor[order] for name, tensor in layer.stock.items()}
    shuffled = replace(layer, stock=stock, index=torch.argsort(order)[layer.index])
    found = run(load(shuffled, spec_of(isa)), shuffled)
    assert all(map(torch.equal, found, run(load(layer, spec_of(isa)), layer)))


@pytest.mark.parametrize("isa", ISAS)
def test_an_expert_chosen_twice_by_a_token_counts_twice(load: Load, isa: Isa) -> None:
    layer = random_layer(64, 48, 4, 2, 9)
    layer.index[:, 1] = layer.index[:, 0]
    for ours, theirs in zip(run(load(layer, spec_of(isa)), layer), layer.expected(), strict=True):
        assert error(ours, theirs) <= 5e-3


def test_the_same_token_many_times_gives_the_same_row(load: Load) -> None:
    layer = random_layer(64, 48, 4, 2, 1)
    x, index, weights = (part.expand(25, -1) for part in (layer.x.bfloat16(), layer.index, layer.weights))
    out = load(layer, spec_of(ISAS[0]))(x, index, weights)
    assert torch.equal(out, out[:1].expand(25, -1))


@pytest.mark.parametrize("isa", ISAS)
def test_no_tokens_give_no_rows(load: Load, isa: Isa) -> None:
    layer = random_layer(64, 48, 4, 2, 0)
    out, d_x, d_weights = run(load(layer, spec_of(isa)), layer)
    assert (out.shape, d_x.shape, d_weights.shape) == ((0, 64), (0, 64), (0, 2))


@pytest.mark.parametrize("form", FORMS)
def test_packed_weights_come_back_as_they_were(load: Load, form: str) -> None:
    layer = random_layer(70, 37, 3, 2, 1, form=form)
    for module in (load(layer, spec_of(ISAS[0], form=form)), load(layer, None, dtype=torch.float64)):
        for name, tensor in layer.stock.items():
            for expert in range(3):
                for part, values in canonical_parts(layer.form, name, tensor[expert]):
                    assert torch.equal(module.expert(expert, part).double(), values), part


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_weights_of_any_float_dtype_are_rounded_to_the_packed_one(load: Load, dtype: torch.dtype) -> None:
    module = load(random_layer(70, 37, 2, 1, 1), spec_of(ISAS[0]))
    matrix = torch.randn(37, 70).to(dtype)
    module.load_expert(1, "up", matrix)
    assert torch.equal(module.expert(1, "up"), matrix.bfloat16())


def _non_finite_layer(value: float, token: int) -> tuple[Layer, Layer]:
    clean = random_layer(70, 37, 5, 2, 29)
    x = clean.x.clone()
    x[token, 3] = value
    return clean, replace(clean, x=x)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("isa", ISAS)
def test_a_non_finite_token_stays_so_and_touches_no_other(load: Load, isa: Isa, value: float) -> None:
    clean, layer = _non_finite_layer(value, token=7)
    module = load(clean, spec_of(isa))
    found, expected = run(module, layer), layer.expected()
    for ours, theirs, finite in zip(found, expected, run(module, clean), strict=True):
        assert torch.equal(ours[7].isfinite(), theirs[7].isfinite())
        assert torch.equal(ours[7].isnan(), theirs[7].isnan())
        others = torch.arange(29) != 7
        assert torch.equal(ours[others], finite[others])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("isa", ISAS)
def test_a_non_finite_gradient_stays_with_its_token(load: Load, isa: Isa, value: float) -> None:
    layer = random_layer(70, 37, 5, 2, 29)
    layer.grad[7, 3] = value
    _, d_x, d_weights = run(load(layer, spec_of(isa)), layer)
    _, expected_d_x, expected_d_weights = layer.expected()
    assert torch.equal(d_x.isfinite(), expected_d_x.isfinite())
    assert torch.equal(d_weights.isfinite(), expected_d_weights.isfinite())


@pytest.mark.parametrize("isa", ISAS)
def test_huge_gates_overflow_as_the_reference_does(load: Load, isa: Isa) -> None:
    layer = random_layer(64, 48, 4, 2, 9)
    layer.x.mul_(10.0 ** torch.linspace(0, 4, 9)[:, None]).copy_(layer.x.bfloat16())
    for ours, theirs in zip(run(load(layer, spec_of(isa)), layer), layer.expected(), strict=True):
        assert error(ours, theirs) <= 5e-3

"""Linear layers that are rounded to INT4: once, after each step of their masters, or merged with an adapter."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F

from ktc.diagnostics import InputRefused
from ktc.model.checkpoint.int4 import Int4Grid
from ktc.model.experts.trained.lora import Factors
from ktc.model.experts.trained.weight_training import WeightTraining
from ktc.model.linears.lora_linear import FusedLinear
from ktc.model.linears.trained_linear import TrainedLinear
from ktc.model.loading import peft_glue

GRID = Int4Grid(32)


def linear(dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 48, dtype=dtype)


def gradients(out: Tensor, *inputs: Tensor) -> list[Tensor]:
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [each.float() for each in torch.autograd.grad(out, inputs, grad)]


def assert_near(found: list[Tensor], expected: list[Tensor], bound: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= bound * theirs.norm()


def test_a_frozen_weight_is_rounded_once_to_the_canonical_values() -> None:
    stock = linear()
    made = FusedLinear.from_linear(stock, grid=GRID)
    made.round_weight()
    assert torch.equal(made.weight, GRID.coded(stock.weight).weight(torch.bfloat16))
    assert "int4 32" in repr(made)
    before = made.weight.clone()
    made.round_weight()
    assert torch.equal(made.weight, before)


@pytest.mark.parametrize("grid", [GRID, Int4Grid(-1), Int4Grid(32, "slime"), None], ids=str)
@pytest.mark.parametrize("masters", [torch.float32, torch.bfloat16])
def test_masters_have_the_straight_through_gradient(grid: Int4Grid | None, masters: torch.dtype) -> None:
    stock = linear()
    made = TrainedLinear.from_linear(stock, WeightTraining(grid, masters))
    assert (made.weight.dtype, made.bias.dtype) == (masters, masters)
    x = torch.randn(5, 3, 64, dtype=torch.bfloat16, requires_grad=True)
    out = made(x)
    master = stock.weight.detach().to(masters).requires_grad_()
    bias = stock.bias.detach().to(masters).requires_grad_()
    weight = master if grid is None else grid.rounded(master)
    expected = F.linear(x, weight.to(x.dtype), bias.to(x.dtype))
    assert torch.equal(out, expected)
    assert_near(gradients(out, x, made.weight, made.bias), gradients(expected, x, master, bias), 5e-3)


def test_a_master_in_fp32_keeps_steps_that_bf16_would_round_away() -> None:
    made = TrainedLinear.from_linear(linear(), WeightTraining(GRID, torch.float32))
    before = made.weight.detach().clone()
    optimizer = torch.optim.SGD([made.weight], lr=1e-5)
    for _ in range(3):
        made(torch.ones(2, 64, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
    moved = made.weight.detach() - before
    assert bool((moved != 0).all())
    assert torch.equal(before.bfloat16().float(), before)


def test_the_weight_is_rounded_once_per_step_and_not_per_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    made = TrainedLinear.from_linear(linear(), WeightTraining(GRID, torch.float32))
    rounded: list[object] = []
    plain = Int4Grid.rounded
    monkeypatch.setattr(Int4Grid, "rounded", lambda grid, weight: (rounded.append(grid), plain(grid, weight))[1])
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1, fused=True)
    outs: list[Tensor] = []
    for _ in range(2):
        for _ in range(3):
            out = made(torch.ones(2, 64, dtype=torch.bfloat16))
            out.float().square().sum().backward()
        outs.append(out.detach())
        optimizer.step()
    assert len(rounded) == 2
    assert not torch.equal(*outs)


def test_copies_train_alone() -> None:
    made = TrainedLinear.from_linear(linear(), WeightTraining(GRID, torch.float32))
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    before, other = made(x), copy.deepcopy(made)
    with torch.no_grad():
        other.weight.mul_(-1)
    assert torch.equal(made(x), before)
    assert not torch.equal(other(x), before)


def adapted(**settings: object) -> tuple[nn.Module, TrainedLinear]:
    peft_glue.install()
    made = TrainedLinear.from_linear(linear(), WeightTraining(GRID, merged=True))
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["layer"], init_lora_weights=False, **settings)  # type: ignore[arg-type]
    torch.manual_seed(2)
    return get_peft_model(nn.ModuleDict({"layer": made}), config), made  # type: ignore[arg-type]


def test_an_adapter_is_merged_before_its_layer_is_rounded() -> None:
    model, made = adapted()
    layer = model.base_model.model["layer"]
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    x = torch.randn(7, 64, dtype=torch.bfloat16, requires_grad=True)
    found = gradients(out := layer(x), x, a, b)
    merged = made.weight.float() + 2.0 * b.float() @ a.float()
    expected = F.linear(x, GRID.rounded(merged).to(x.dtype), made.bias)
    assert torch.equal(out, expected)
    assert_near(found, gradients(expected, x, a, b), 5e-3)
    with model.disable_adapter():
        assert torch.equal(layer(x), F.linear(x, GRID.rounded(made.weight), made.bias))
    with pytest.raises(InputRefused, match="L433"):
        model.merge_adapter()


def test_an_adapter_that_cannot_be_merged_in_every_step_is_refused() -> None:
    for settings in ({"lora_dropout": 0.1}, {"use_dora": True}):
        with pytest.raises(InputRefused, match="L432"):
            adapted(**settings)


def test_a_merged_weight_is_the_same_under_autocast() -> None:
    made = TrainedLinear.from_linear(linear(), WeightTraining(GRID, merged=True))
    outputs, inputs = made.weight.shape
    factors = Factors(torch.randn(4, inputs), torch.randn(outputs, 4), 0.5)
    plain = made.rounded(torch.bfloat16, factors).clone()
    made.kept.weight = None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(made.rounded(torch.bfloat16, factors), plain)


def test_a_layer_that_served_in_inference_mode_trains() -> None:
    model, layer = adapted()
    wrapped = model.base_model.model["layer"]
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        served = wrapped(x)
    out = wrapped(x)
    assert torch.equal(out, served)
    out.sum().backward()
    assert layer.kept.weight is not None and not layer.kept.weight.is_inference()


def test_a_merged_adapter_counts_with_its_scale_and_one_per_row_is_refused() -> None:
    model, _ = adapted()
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    wrapped = model.base_model.model["layer"]
    before = wrapped(x)
    wrapped.set_scale("default", 8.0)
    assert not torch.equal(wrapped(x), before)
    with pytest.raises(InputRefused, match="L432: each row of the batch names its own adapter"):
        wrapped(x, adapter_names=["__base__"] * 3)


def test_weights_that_cannot_be_rounded_are_refused_with_their_name() -> None:
    made = TrainedLinear.from_linear(linear(), WeightTraining(GRID, torch.float32))
    made.fqn = "model.layers.0.self_attn.q_proj"
    with torch.no_grad():
        made.weight[1, 2] = torch.inf
    with pytest.raises(InputRefused, match=r"L463: .* `model\.layers\.0\.self_attn\.q_proj` cannot be rounded"):
        made(torch.randn(3, 64, dtype=torch.bfloat16))


def test_a_frozen_layer_puts_weights_that_it_loads_on_its_grid() -> None:
    made = FusedLinear.from_linear(linear(), grid=GRID)
    stock = torch.randn(48, 64).bfloat16()
    made.load_state_dict({"weight": stock, "bias": made.bias.detach().clone()})
    assert torch.equal(made.weight, GRID.rounded(stock))

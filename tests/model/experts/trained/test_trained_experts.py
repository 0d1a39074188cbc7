"""Experts whose weights train, or take a merged adapter: gradients of weights, rounding, and when they are packed."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from kernel_layers import EXACT_FORMS, ISAS, Layer, Load, built, error, experts_of, isas_with, random_layer, spec_of
from lora_layers import Adapted, adapt, trained, with_gradients
from torch import Tensor
from torch.func import functional_call

from ktc.diagnostics import InputRefused
from ktc.foundation.isa import Isa
from ktc.model.checkpoint.int4 import Int4Grid
from ktc.model.experts.layouts.packed import PackedExperts
from ktc.model.experts.layouts.stock_layout import canonical_parts
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.references.reference import fused_moe_reference
from ktc.model.experts.trained.lora import ExpertsLora, Lora
from ktc.model.experts.trained.weight_training import WeightTraining
from ktc.model.kernels.kernel_library import Kernel

FULL = WeightTraining(masters=torch.float32)
SHAPES = {
    "odd sizes": (70, 37, 5, 2, 29, 5),
    "one token": (130, 50, 16, 4, 1, 16),
    "empty experts": (96, 64, 32, 2, 7, 3),
    "one expert": (48, 33, 1, 1, 31, 1),
}
GROUP = 32
INT4_ISA: Isa = "avx2" if "avx2" in ISAS else ISAS[0]
GPT_OSS = "silu(alpha=1.702, limit=1.25, up_offset=1.0) biased transposed interleaved"
INT4 = {form: spec_of(INT4_ISA, form=form, codes=("int4", 128)) for form in ("silu", GPT_OSS)}


def int4_kernel(form: str = "silu") -> Kernel:
    return built((INT4[form],)).kernel(INT4[form].entry)


def reference_of(layer: Layer) -> tuple[Tensor, ...]:
    """Output, then gradients of hidden states, routing weights and stock tensors, in float64."""
    x, weights = layer.x.clone().requires_grad_(), layer.weights.clone().requires_grad_()
    stock = [tensor.clone().requires_grad_() for tensor in layer.stock.values()]
    out = fused_moe_reference(x, layer.index, weights, stock, layer.form)
    return with_gradients(out, layer.grad, (x, weights, *stock))


def run_trained(module: FusedMoe, layer: Layer, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    x = layer.x.to(dtype).requires_grad_()
    weights = layer.weights.to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
    return with_gradients(module(x, layer.index, weights), layer.grad, (x, weights, *module.parameters()))


def assert_close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], bound: float) -> None:
    assert [tuple(each.shape) for each in found] == [tuple(each.shape) for each in expected]
    assert [round(error(ours, theirs), 5) for ours, theirs in zip(found, expected, strict=True)] == pytest.approx(
        [0] * len(found), abs=bound
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("isa", ISAS)
def test_gradients_of_weights_are_those_of_the_reference(load: Load, isa: Isa, shape: tuple[int, ...]) -> None:
    layer = random_layer(*shape[:5], experts_used=shape[5])
    assert_close(run_trained(load(layer, spec_of(isa), training=FULL), layer), reference_of(layer), 6e-3)


@pytest.mark.parametrize("form", EXACT_FORMS)
def test_gradients_of_weights_and_biases_are_exact_in_float64(load: Load, form: str) -> None:
    layer = random_layer(70, 37, 5, 2, 29, form=form)
    module = load(layer, spec_of("scalar", "fp64", form), training=WeightTraining(masters=torch.float64))
    assert_close(run_trained(module, layer, torch.float64), reference_of(layer), 1e-12)


@pytest.mark.parametrize(("isa", "form"), isas_with(GPT_OSS))
def test_experts_of_another_layout_train_in_their_stock_layout(load: Load, isa: Isa, form: str) -> None:
    layer = random_layer(70, 37, 5, 2, 29, form=form)
    for activations in ("keep", "recompute"):
        module = load(layer, spec_of(isa, form=form), training=FULL, activations=activations)
        found, expected = run_trained(module, layer), reference_of(layer)
        assert_close(found[3:], expected[3:], 5e-2)  # a rounded gate may lie on the other side of the limit


def test_gradcheck_of_the_fused_node(load: Load) -> None:
    layer = random_layer(6, 5, 3, 2, 4)
    module = load(layer, spec_of("scalar", "fp64"), training=WeightTraining(masters=torch.float64))

    def of(x: Tensor, weights: Tensor, first: Tensor, down: Tensor) -> Tensor:
        with torch.no_grad():
            module.gate_up_proj.copy_(first)
            module.down_proj.copy_(down)
        return module(x, layer.index, weights)

    names = ("gate_up_proj", "down_proj")
    out = module(layer.x, layer.index, layer.weights)
    grads = torch.autograd.grad(out, [getattr(module, name) for name in names], layer.grad)
    for which, grad in enumerate(grads):  # numeric gradients: the stock tensors are parameters, not arguments
        stock = [layer.stock[name].clone() for name in names]
        numeric = torch.empty_like(stock[which])
        for place in range(numeric.numel()):
            sides: list[Tensor] = []
            for step in (1e-6, -1e-6):
                moved = [each.clone() for each in stock]
                moved[which].view(-1)[place] += step
                sides.append((of(layer.x, layer.weights, *moved).detach() * layer.grad).sum())
            numeric.view(-1)[place] = (sides[0] - sides[1]) / 2e-6
        assert error(grad, numeric) < 1e-7


def rounded(layer: Layer, grid: Int4Grid) -> Layer:
    stock = {
        name: tensor if tensor.dim() == 2 else torch.stack([_rounded(each, layer, grid) for each in tensor])
        for name, tensor in layer.stock.items()
    }
    return replace(layer, stock=stock)


def _rounded(matrix: Tensor, layer: Layer, grid: Int4Grid) -> Tensor:
    """The matrix of one expert in its stock layout; a group is a range of what it contracts."""
    rows = matrix.t() if layer.form.transposed else matrix
    found = grid.rounded(rows.bfloat16()).double()
    return found.t() if layer.form.transposed else found


@pytest.mark.parametrize(("group", "form"), [(128, "silu"), (-1, "silu"), (128, GPT_OSS)])
def test_trained_experts_are_rounded_and_their_gradient_passes_the_rounding(group: int, form: str) -> None:
    layer, grid = random_layer(256, 128, 4, 2, 40, form=form), Int4Grid(group)
    training = WeightTraining(grid, torch.float32)
    module = experts_of(4, 256, 128, 2, layer.form, kernel=int4_kernel(form), training=training)
    load_into(module, layer)
    assert_close(run_trained(module, layer), reference_of(rounded(layer, grid)), 8e-3)
    with torch.no_grad():
        module.down_proj.mul_(1.5)
    changed = replace(layer, stock={**layer.stock, "down_proj": layer.stock["down_proj"] * 1.5})
    assert_close(run_trained(module, changed), reference_of(rounded(changed, grid)), 8e-3)


def load_into(module: FusedMoe, layer: Layer) -> None:
    for name, tensor in layer.stock.items():
        for expert in range(layer.num_experts):
            for part, values in canonical_parts(layer.form, name, tensor[expert]):
                module.load_expert(expert, part, values)


@pytest.mark.parametrize("grid", [Int4Grid(128), Int4Grid(-1), Int4Grid(128, "slime")], ids=str)
def test_frozen_experts_hold_the_weights_of_the_canonical_quantiser(load: Load, grid: Int4Grid) -> None:
    layer = random_layer(256, 128, 3, 2, 5)
    if grid.scale_mode == "slime":
        module = load(layer, spec_of(ISAS[0]), training=WeightTraining(grid))
    else:
        module = experts_of(3, 256, 128, 2, kernel=int4_kernel(), training=WeightTraining(grid))
        load_into(module, layer)
    reference = load(layer, None, training=WeightTraining(grid))
    for expert in range(3):
        for part in ("gate", "up", "down"):
            stock = dict(
                pair for name, each in layer.stock.items() for pair in canonical_parts(layer.form, name, each[expert])
            )
            wanted = grid.coded(stock[part].bfloat16()).weight(torch.bfloat16)
            assert torch.equal(module.expert(expert, part), wanted)
            assert torch.equal(reference.expert(expert, part), wanted)


@pytest.mark.parametrize(("ranks", "form"), [((8, 3), "silu"), ((0, 8), "silu"), ((8, 3), GPT_OSS)])
def test_a_merged_adapter_is_rounded_with_the_weights(load: Load, ranks: tuple[int, int], form: str) -> None:
    adapted = adapt(random_layer(256, 128, 4, 2, 40, form=form), ranks)
    training = WeightTraining(Int4Grid(128), merged=True)
    module = experts_of(4, 256, 128, 2, adapted.layer.form, kernel=int4_kernel(form), training=training)
    load_into(module, adapted.layer)
    found, expected = (
        run_merged(module, adapted),
        run_merged(load(adapted.layer, None, training=training).float(), adapted),
    )
    assert_close(found, expected, 1e-2)
    with torch.no_grad():
        x, weights, lora = trained(adapted, torch.bfloat16, torch.float32)
        assert error(module(x, adapted.layer.index, weights, lora), found[0].double()) < 3e-3


def run_merged(module: FusedMoe, adapted: Adapted) -> tuple[Tensor, ...]:
    x, weights, lora = trained(adapted, module.weights.dtype, torch.float32)
    out = module(x, adapted.layer.index, weights, lora)
    found = with_gradients(out, adapted.layer.grad, (x, weights, *lora.factors))
    return tuple(each.double() for each in found)


def test_weights_are_packed_once_per_optimizer_step(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = random_layer(256, 128, 4, 2, 8)
    module = experts_of(4, 256, 128, 2, kernel=int4_kernel(), training=WeightTraining(Int4Grid(128), torch.float32))
    load_into(module, layer)
    packed: list[int] = []
    load = PackedExperts.load

    def counted(self: PackedExperts, expert: int, *args: object) -> None:
        packed.append(expert)
        load(self, expert, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(PackedExperts, "load", counted)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
    outs: list[Tensor] = []
    for _ in range(2):
        for _ in range(3):
            out = module(layer.x.bfloat16(), layer.index, layer.weights.float())
            out.float().square().sum().backward()
        outs.append(out.detach())
        optimizer.step()
    assert len(packed) == 2 * 4 * 3
    assert not torch.equal(*outs)


def test_a_step_between_forward_and_backward_is_an_error() -> None:
    layer = random_layer(256, 128, 4, 2, 8)
    module = experts_of(4, 256, 128, 2, kernel=int4_kernel(), training=WeightTraining(Int4Grid(128), torch.float32))
    load_into(module, layer)
    out = module(layer.x.bfloat16(), layer.index, layer.weights.float())
    with torch.no_grad():
        module.down_proj.mul_(2)
        module(layer.x.bfloat16(), layer.index, layer.weights.float())
    with pytest.raises(InputRefused, match="L464: the weights of `routed experts` changed between the forward and"):
        out.float().sum().backward()


def test_parameters_that_pytorch_puts_in_their_place_are_the_ones_that_count() -> None:
    layer = random_layer(256, 128, 4, 2, 8)
    sizes, training = (4, 256, 128, 2), WeightTraining(Int4Grid(128), torch.float32)
    module = experts_of(*sizes, kernel=int4_kernel(), training=training)
    load_into(module, layer)
    inputs = layer.x.bfloat16(), layer.index, layer.weights.float()
    before = module(*inputs)
    doubled = {name: tensor.detach() * 2 for name, tensor in module.named_parameters()}
    other = functional_call(module, doubled, inputs)
    assert not torch.equal(other, before)
    assert torch.equal(module(*inputs), before)
    fresh = experts_of(*sizes, kernel=int4_kernel(), training=training)
    fresh.load_state_dict(doubled, assign=True)
    assert torch.equal(fresh(*inputs), other)


def test_weights_that_cannot_be_rounded_are_named() -> None:
    layer = random_layer(256, 128, 4, 2, 8)
    module = experts_of(4, 256, 128, 2, kernel=int4_kernel(), training=WeightTraining(Int4Grid(128), torch.float32))
    load_into(module, layer)
    inputs = layer.x.bfloat16(), layer.index, layer.weights.float()
    before = module(*inputs)
    with torch.no_grad():
        module.down_proj[2, 0, 0] = torch.nan
    for _ in range(2):
        with pytest.raises(InputRefused, match=r"L463: the weights of `routed experts\.2\.down` cannot be rounded"):
            module(*inputs)
    load_into(module, layer)
    assert torch.equal(module(*inputs), before)


def test_a_merged_adapter_counts_with_its_scale_and_all_that_are_active() -> None:
    adapted = adapt(random_layer(256, 128, 3, 2, 9), 8)
    training = WeightTraining(Int4Grid(128), merged=True)
    module = experts_of(3, 256, 128, 2, kernel=int4_kernel(), training=training)
    load_into(module, adapted.layer)
    inputs = adapted.layer.x.bfloat16(), adapted.layer.index, adapted.layer.weights.float()
    gate_up = adapted.lora.gate_up
    assert gate_up is not None
    held = gate_up.a.bfloat16(), gate_up.b.bfloat16()

    def out(scale: float) -> Tensor:
        """What factors that were joined in this call give: other tensors each time."""
        a, b = (each.clone() for each in held)
        return module(*inputs, lora=ExpertsLora(Lora(a, b, scale, held, (scale,))))

    first = out(1.0)
    state = module.weights.packed_from
    assert torch.equal(out(1.0), first) and module.weights.packed_from == state
    assert not torch.equal(out(4.0), first)
    held[1].mul_(4)
    assert not torch.equal(out(1.0), first)


def test_copies_of_trained_experts_train_alone() -> None:
    layer = random_layer(256, 128, 4, 2, 8)
    module = experts_of(4, 256, 128, 2, kernel=int4_kernel(), training=WeightTraining(Int4Grid(128), torch.float32))
    load_into(module, layer)
    inputs = layer.x.bfloat16(), layer.index, layer.weights.float()
    before = module(*inputs)
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.gate_up_proj.mul_(2)
    assert not torch.equal(other(*inputs), before)
    assert torch.equal(module(*inputs), before)
    assert set(other.state_dict()) == {"gate_up_proj", "down_proj"}
    module.load_state_dict(other.state_dict())
    assert torch.equal(module(*inputs), other(*inputs))

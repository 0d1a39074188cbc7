"""One call with the tokens of several: the outputs and gradients of separate calls."""

from __future__ import annotations

import pytest
import torch
from kernel_layers import ISAS, Layer, Load, error, random_layer, spec_of
from torch import Tensor

from ktc.model.experts.module import FusedMoe
from ktc.model.experts.trained.lora import ExpertsLora, Lora

SPEC = spec_of(ISAS[0])
LENGTHS = (7, 0, 1, 21, 16)
Results = tuple[Tensor, Tensor, Tensor]  # output, gradients of hidden states and of routing weights


def factors(layer: Layer) -> ExpertsLora:
    generator = torch.Generator().manual_seed(3)

    def lora(inputs: int, outputs: int) -> Lora:
        a, b = (
            torch.randn(layer.num_experts, *shape, generator=generator).mul(0.1).requires_grad_()
            for shape in ((4, inputs), (outputs, 4))
        )
        return Lora(a, b, 0.5)

    return ExpertsLora(lora(layer.hidden, 2 * layer.intermediate), lora(layer.intermediate, layer.hidden))


def in_calls(module: FusedMoe, layer: Layer, lengths: tuple[int, ...], lora: ExpertsLora | None = None) -> Results:
    """The results of one call for each of `lengths`, joined; gradients of factors are added up."""
    x, weights = layer.x.bfloat16().requires_grad_(), layer.weights.float().requires_grad_()
    inputs = zip(x.split(lengths), layer.index.split(lengths), weights.split(lengths), strict=True)
    outs = [module(*each, lora) for each in inputs]
    torch.autograd.backward(outs, layer.grad.bfloat16().split(lengths))
    assert x.grad is not None
    assert weights.grad is not None
    return torch.cat(outs), x.grad, weights.grad


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "amx"])
def test_one_call_gives_the_bits_of_separate_calls(load: Load, isa: str, activations: str) -> None:
    layer = random_layer(70, 37, 5, 2, sum(LENGTHS))
    module = load(layer, spec_of(isa), activations=activations)  # type: ignore[arg-type]
    assert all(map(torch.equal, in_calls(module, layer, (sum(LENGTHS),)), in_calls(module, layer, LENGTHS)))


def test_gradients_of_lora_are_the_sums_of_separate_calls(load: Load) -> None:
    layer = random_layer(70, 37, 5, 2, sum(LENGTHS))
    module = load(layer, SPEC)
    ours, theirs = factors(layer), factors(layer)
    in_calls(module, layer, (sum(LENGTHS),), ours)
    in_calls(module, layer, LENGTHS, theirs)
    for once, summed in zip(ours.factors, theirs.factors, strict=True):
        assert once is not None
        assert summed is not None
        assert once.grad is not None
        assert summed.grad is not None
        # On AMX experts with few tokens are computed by other instructions, and what they round differs.
        assert error(once.grad, summed.grad.double()) < (5e-3 if SPEC.isa == "amx" else 1e-6)

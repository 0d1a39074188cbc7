"""A router that chooses another number of experts than the kernel was built for: the reference's results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_layers import CONSTANT, ISAS, Load, error, random_layer, run, spec_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ktc.model.experts.backends.any_top_k import per_token, rows_of
from ktc.model.experts.trained.lora import ExpertsLora, Lora

SPEC = spec_of(ISAS[0], sizes=CONSTANT)  # whose sizes are compile-time constants, two experts per token among them
EXACT = spec_of("scalar", "fp64")


@pytest.mark.parametrize("top_k", [1, 3, 4, 5])
def test_output_and_gradients_are_those_of_the_reference(load: Load, top_k: int) -> None:
    layer = random_layer(*CONSTANT[:3], top_k, 11)
    module = load(replace(layer, top_k=CONSTANT[3]), SPEC)
    for ours, theirs in zip(run(module, layer), layer.expected(), strict=True):
        assert error(ours, theirs) <= 5e-3


@pytest.mark.parametrize("top_k", [1, 3])
def test_in_float64_it_is_exact_with_lora_and_recomputed_activations_too(load: Load, top_k: int) -> None:
    layer = random_layer(9, 7, 4, top_k, 6)
    generator = torch.Generator().manual_seed(2)
    factors = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((4, 3, 9), (4, 14, 3), (4, 2, 7), (4, 9, 2))
    ]
    a, b, c, d = factors
    lora = ExpertsLora(Lora(a, b, 0.5), Lora(c, d, 2.0))
    found = list[tuple[Tensor, ...]]()
    for spec, activations in ((EXACT, "keep"), (EXACT, "recompute"), (None, "keep")):
        module = load(replace(layer, top_k=2), spec, activations=activations, dtype=torch.float64)
        x, weights = layer.x.clone().requires_grad_(), layer.weights.clone().requires_grad_()
        out = checkpoint(module, x, layer.index, weights, lora, use_reentrant=False)
        found.append((out.detach(), *torch.autograd.grad(out, (x, weights, *factors), layer.grad)))
    for ours in found[:2]:
        assert all(error(a, b) < 1e-12 for a, b in zip(ours, found[2], strict=True))


def test_no_tokens_and_a_call_without_gradients(load: Load) -> None:
    layer = random_layer(*CONSTANT[:3], 3, 4)
    module = load(replace(layer, top_k=CONSTANT[3]), SPEC)
    x, expected = layer.x.bfloat16(), layer.expected()[0]
    with torch.no_grad():
        assert error(module(x, layer.index, layer.weights), expected) <= 5e-3
        assert module(x[:0], layer.index[:0], layer.weights[:0]).shape == (0, CONSTANT[0])


def test_rows_repeat_the_first_expert_without_weight() -> None:
    x, index = torch.arange(2.0)[:, None], torch.tensor([[5, 6, 7], [1, 2, 3]])
    rows, chosen, weights = rows_of(2, x, index, torch.ones(2, 3))
    assert chosen.tolist() == [[5, 6], [7, 5], [1, 2], [3, 1]]
    assert weights.tolist() == [[1, 1], [1, 0]] * 2
    assert rows.flatten().tolist() == [0, 0, 1, 1]
    assert per_token(rows, 2).flatten().tolist() == [0, 2]

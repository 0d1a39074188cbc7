"""Experts beyond the last matrix return the hidden states, as in stock's loop, also where numbers overflow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ktc.model.experts.own_module import call_routed
from ktc.model.experts.references.reference import fused_moe_reference

EXPERTS, HIDDEN, INTER = 3, 4, 5


def stock(hidden: Tensor, index: Tensor, weights: Tensor, matrices: tuple[Tensor, Tensor]) -> Tensor:
    """Each expert's rows with its weight; experts from number 3 on are the identity."""
    out = torch.zeros_like(hidden)
    for token, slot in torch.cartesian_prod(torch.arange(index.shape[0]), torch.arange(index.shape[1])).tolist():
        expert, row = int(index[token, slot]), hidden[token : token + 1]
        if expert < EXPERTS:
            row = fused_moe_reference(row, torch.tensor([[expert]]), torch.ones(1, 1), matrices)
        out = out.index_add(0, torch.tensor([token]), row * weights[token, slot])
    return out


@pytest.mark.parametrize("scale", [1.0, 1e30], ids=["usual", "overflowing"])
def test_identity_experts_are_those_of_a_loop_over_all_experts(scale: float) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(EXPERTS, 2 * INTER, HIDDEN).abs(), torch.randn(EXPERTS, HIDDEN, INTER).abs() * scale
    hidden = (torch.randn(6, HIDDEN).abs() * scale**0.3).requires_grad_()
    index = torch.tensor([[0, 1, 2], [2, 3, 4], [3, 4, 5], [5, 1, 3], [4, 0, 2], [1, 2, 5]])
    weights = torch.rand(6, 3).requires_grad_()
    found = call_routed(
        "identity", EXPERTS, lambda *given: fused_moe_reference(*given, matrices), hidden, index, weights
    )
    wanted = stock(hidden, index, weights, matrices)
    assert bool(wanted.isinf().any()) == (scale > 1)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    if scale == 1:
        for mine, theirs in zip(
            *(torch.autograd.grad(y.square().sum(), (hidden, weights)) for y in (found, wanted)), strict=True
        ):
            torch.testing.assert_close(mine, theirs)

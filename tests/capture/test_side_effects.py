"""A block has a side effect if its call leaves more behind than a result; a graph could not carry it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ktc.capture.side_effects import side_effect

KEPT: list[Tensor] = []
CALLS = {"all": 0}


class Block(nn.Module):
    def __init__(self, compute: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.weight = nn.Parameter(torch.empty(8, 8, device="meta"))
        self.register_buffer("counts", torch.zeros(8, device="meta"))
        self.counts: Tensor
        self.calls = 0
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def nothing(block: Block, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:2] = x[:2]
    out.add_(x @ block.weight)
    return out.mul_(2)


def counting(block: Block, x: Tensor) -> Tensor:
    block.calls += 1
    return x


def counting_elsewhere(block: Block, x: Tensor) -> Tensor:
    CALLS["all"] += 1
    return x


def keeping(block: Block, x: Tensor) -> Tensor:
    block.loss = x.mean()
    return x


def appending(block: Block, x: Tensor) -> Tensor:
    block.losses.append(x.mean())
    return x


def keeping_elsewhere(block: Block, x: Tensor) -> Tensor:
    KEPT.append(x.mean())
    return x


def writing_a_buffer(block: Block, x: Tensor) -> Tensor:
    block.counts += 1
    return x


def writing_its_input(block: Block, x: Tensor) -> Tensor:
    x[0].mul_(2)
    return x


def keeping_while_gradients_are_on(block: Block, x: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        KEPT.append((x @ block.weight).mean())
    return x


def clipping_its_gradient(block: Block, x: Tensor) -> Tensor:
    out = x @ block.weight
    if out.requires_grad:
        out.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return out


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1, 1)


def own_backward(block: Block, x: Tensor) -> Tensor:
    return Clipped.apply(x @ block.weight)


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (nothing, ""),
        (counting, "it changes `calls`"),
        (counting_elsewhere, "it changes `test_side_effects.CALLS`"),
        (keeping, "it keeps a result as its attribute `loss`"),
        (appending, "it keeps a result as its attribute `losses`"),
        (keeping_elsewhere, "a tensor that it computes outlives its call"),
        (keeping_while_gradients_are_on, "a tensor that it computes outlives its call"),
        (clipping_its_gradient, "it computes gradients in its own way"),
        (own_backward, "it computes gradients in its own way"),
        (writing_a_buffer, "it changes a tensor that it is given"),
        (writing_its_input, "it changes a tensor that it is given"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_side_effect_is_named(compute: Callable[[Block, Tensor], Tensor], reason: str) -> None:
    block, x = Block(compute), torch.empty(3, 8, device="meta")
    assert side_effect(block, lambda: block(x)) == reason

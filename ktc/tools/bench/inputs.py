"""Inputs of candidates: random weights of the experts, and batches with a random routing.

Shapes: T tokens, H hidden, I intermediate, E experts, K experts per token, R rank. All experts hold the same values at
rotated places, which costs a copy instead of a random number per weight, and is the same to every kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from ktc.model.experts.trained.lora import ExpertsLora, Lora
from ktc.tools.bench.layer_requests import Shape

# Several routings, taken in turn: a single token's few experts must not stay in the last-level cache.
NUM_ROUTINGS: Final = 8
_RANGE: Final = 0.04
_LORA_ALPHA: Final = 16.0
_SEED: Final = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """One call: hidden states, the router's choice, and the gradient of the output."""

    x_TH: Tensor
    index_TK: Tensor
    weights_TK: Tensor
    grad_TH: Tensor

    @property
    def num_active(self) -> int:
        """Experts that have a token."""
        return int(torch.bincount(self.index_TK.flatten()).count_nonzero())

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        return Batch(*(tensor.to(device) for tensor in (self.x_TH, self.index_TK, self.weights_TK, self.grad_TH)))


class Weights:
    """The experts of one layer in bf16. The stacked tensors are made at their first use."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        generator = torch.Generator().manual_seed(_SEED)
        self._gate_up = _uniform((2 * shape.intermediate, shape.hidden), generator)
        self._down = _uniform((shape.hidden, shape.intermediate), generator)

    def expert(self, expert: int) -> tuple[Tensor, Tensor]:
        """(2I, H) and (H, I) of one expert."""
        return self._gate_up.roll(expert), self._down.roll(expert)

    @cached_property
    def stacked(self) -> tuple[Tensor, Tensor]:
        """(E, 2I, H) and (E, H, I), as Hugging Face's modules hold them."""
        num_experts = self._shape.num_experts
        both = tuple(
            torch.empty((num_experts, *one.shape), dtype=torch.bfloat16) for one in (self._gate_up, self._down)
        )
        for expert in range(num_experts):
            for whole, one in zip(both, self.expert(expert), strict=True):
                whole[expert] = one
        return both[0], both[1]


def batches(shape: Shape, tokens: int) -> tuple[Batch, ...]:
    """Batches of `tokens` tokens that differ in their routing, the same ones in every run."""
    generator = torch.Generator().manual_seed(tokens)

    def one() -> Batch:
        scores = torch.rand(tokens, shape.num_experts, generator=generator)
        weights, index = scores.topk(shape.top_k, dim=-1)
        x, grad = (torch.randn(tokens, shape.hidden, generator=generator).bfloat16() for _ in range(2))
        return Batch(x, index, weights / weights.sum(-1, keepdim=True), grad)

    return tuple(one() for _ in range(NUM_ROUTINGS))


def lora_factors(shape: Shape, rank: int, dropout: float = 0.0) -> ExpertsLora:
    """Trained factors on gate, up and down in fp32, stored as PEFT stores them: A by expert, B with experts last."""
    generator = torch.Generator().manual_seed(rank)
    scale = _LORA_ALPHA / rank
    gate_up = _factors(shape.num_experts, rank, shape.hidden, 2 * shape.intermediate, generator)
    down = _factors(shape.num_experts, rank, shape.intermediate, shape.hidden, generator)
    return ExpertsLora(Lora(*gate_up, scale, dropout=dropout), Lora(*down, scale, dropout=dropout))


def _uniform(size: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.empty(size, dtype=torch.bfloat16).uniform_(-_RANGE, _RANGE, generator=generator)


def _factors(
    num_experts: int, rank: int, inputs: int, outputs: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    a = torch.randn(num_experts, rank, inputs, generator=generator).mul_(0.01)
    b = torch.randn(outputs, rank, num_experts, generator=generator).mul_(0.01)
    return a.requires_grad_(), b.requires_grad_().permute(2, 0, 1)

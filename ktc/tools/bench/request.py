"""The request of a measurement: a shape, numbers of tokens, passes, implementations. No torch, no checks.

`options.parse` makes a `Request` of a command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ktc.foundation.isa import Isa

Pass = Literal["forward", "train"]
PASSES: tuple[Pass, ...] = ("forward", "train")


@dataclass(frozen=True, slots=True)
class Shape:
    """The experts of one layer: H, I, E, k."""

    name: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int

    def __str__(self) -> str:
        return f"{self.name} H{self.hidden} I{self.intermediate} E{self.num_experts} k{self.top_k}"

    @property
    def expert_weights(self) -> int:
        """Weights of one expert: gate, up and down."""
        return 3 * self.hidden * self.intermediate

    def flops(self, tokens: int, passes: Pass) -> int:
        """Count two FLOPs per multiply-add. Training adds the gradients of hidden states and routing weights."""
        forward = 2 * tokens * self.top_k * self.expert_weights
        return forward if passes == "forward" else 2 * forward


SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("v2lite", 2048, 1408, 64, 6),
        Shape("qwen3_30b", 2048, 768, 128, 8),
        Shape("v3", 7168, 2048, 256, 8),
    )
}


@dataclass(frozen=True, slots=True)
class Request:
    """One run. `impls` are names of implementations; those in `required` must be there, others may be left out.

    `rounds` 0 is a number by the cost of a round. `lora_ranks` has 0 for experts without LoRA. With one thread time is
    CPU time, with more of them wall time.
    """

    shape: Shape
    tokens: tuple[int, ...]
    passes: tuple[Pass, ...]
    impls: tuple[str, ...]
    required: frozenset[str]
    lora_ranks: tuple[int, ...]
    isas: tuple[Isa, ...]
    threads: int = 1
    rounds: int = 0
    kt_python: Path | None = None

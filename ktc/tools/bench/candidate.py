"""`Candidate`: an implementation that can be measured, and the two kinds that run in this process or in another one.

In: a pass, a rank of LoRA and the numbers of the batches to run. Out: seconds of CPU and of the clock on the wall.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ktc.tools.bench.inputs import Batch
from ktc.tools.bench.limits import Samples
from ktc.tools.bench.request import Pass

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Hidden states, the router's choice and its weights to the layer's output, as Hugging Face's experts modules."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """The time that a piece of work took."""

    cpu: float
    wall: float


class Candidate(Protocol):
    """`expert_bytes`: what an expert's weights take in the format it computes with. `isa` is "" where it is unknown."""

    impl: str
    isa: str
    expert_bytes: float

    def reason_against(self, tokens: int, passes: Pass, rank: int) -> str:
        """Return the reason why this is not measured, "" if it is."""
        ...

    def take(self, batches: Sequence[Batch]) -> None:
        """Set the batches of the following calls of `run`."""
        ...

    def run(self, passes: Pass, rank: int, numbers: Sequence[int]) -> Seconds:
        """Run these batches one after the other. The first call may load, pack and compile."""
        ...

    def limits(self, shared: Samples) -> Samples:
        """Return the limits of the process that it runs in; its figures are shares of them."""
        ...


@dataclass(frozen=True, slots=True)
class Layer:
    """Experts ready to be called, and what is trained beside hidden states and routing weights."""

    experts: Experts
    trained: tuple[Tensor, ...] = ()

    def forward(self, batch: Batch) -> None:
        """Without a graph."""
        with torch.no_grad():
            self.experts(batch.x_TH, batch.index_TK, batch.weights_TK)

    def train(self, batch: Batch) -> None:
        """Forward, and the gradients of hidden states, routing weights and factors."""
        x, weights = batch.x_TH.detach().requires_grad_(), batch.weights_TK.detach().requires_grad_()
        out = self.experts(x, batch.index_TK, weights)
        torch.autograd.grad(out, (x, weights, *self.trained), batch.grad_TH)


class LocalCandidate:
    """A candidate of this process. `make(rank)` gives its layer, once for every rank, which is kept."""

    def __init__(
        self,
        impl: str,
        make: Callable[[int], Layer],
        expert_bytes: float,
        isa: str = "",
        reason_against: Callable[[int, Pass, int], str] = lambda tokens, passes, rank: "",
    ) -> None:
        self.impl, self.isa, self.expert_bytes = impl, isa, expert_bytes
        self._make, self._reason_against = make, reason_against
        self._layers: dict[int, Layer] = {}
        self._batches: Sequence[Batch] = ()

    def reason_against(self, tokens: int, passes: Pass, rank: int) -> str:
        """As the function says that it was made with."""
        return self._reason_against(tokens, passes, rank)

    def take(self, batches: Sequence[Batch]) -> None:
        """Share the batches among all local candidates."""
        self._batches = batches

    def run(self, passes: Pass, rank: int, numbers: Sequence[int]) -> Seconds:
        """By the clocks of this process."""
        if rank not in self._layers:
            self._layers[rank] = self._make(rank)
        layer = self._layers[rank]
        call = layer.forward if passes == "forward" else layer.train
        with measured() as spent:
            for number in numbers:
                call(self._batches[number])
        return spent[0]

    def limits(self, shared: Samples) -> Samples:
        """Return the limits of this process."""
        return shared


@contextmanager
def measured() -> Generator[list[Seconds]]:
    """Yield a list that holds the time of the block after its end."""
    spent: list[Seconds] = []
    cpu, wall = time.process_time(), time.perf_counter()
    yield spent
    spent.append(Seconds(time.process_time() - cpu, time.perf_counter() - wall))

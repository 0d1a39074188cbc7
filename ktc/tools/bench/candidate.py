"""`Candidate`: an implementation of a layer's experts that can be measured, and the one that runs in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ktc.tools.bench.inputs import Batch
from ktc.tools.bench.layer_requests import Pass
from ktc.tools.bench.rounds import Seconds, measured
from ktc.tools.measure.limits import Samples

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Hidden states, the router's choice and its weights to the layer's output, as Hugging Face's experts modules."""
ReasonAgainst = Callable[[int, Pass, int], str]
"""Tokens, pass and LoRA rank to the reason why a candidate is not measured with them, "" if it is."""


class Candidate(Protocol):
    """`expert_bytes`: what an expert's weights take in the format it computes with. `isa` is "" where it is unknown."""

    impl: str
    isa: str
    expert_bytes: float
    reason_against: ReasonAgainst

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
        """Compute the output without a graph."""
        with torch.no_grad():
            self.experts(batch.x_TH, batch.index_TK, batch.weights_TK)

    def train(self, batch: Batch) -> None:
        """Compute the output, and the gradients of hidden states, routing weights and factors."""
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
        reason_against: ReasonAgainst = lambda tokens, passes, rank: "",
    ) -> None:
        self.impl, self.isa, self.expert_bytes, self.reason_against = impl, isa, expert_bytes, reason_against
        self._make, self._layers = make, dict[int, Layer]()
        self._batches: Sequence[Batch] = ()

    def take(self, batches: Sequence[Batch]) -> None:
        """Share the batches among all local candidates."""
        self._batches = batches

    def run(self, passes: Pass, rank: int, numbers: Sequence[int]) -> Seconds:
        """Measure by the clocks of this process."""
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

"""The parts of a trainer that computes its losses itself, so that those of several micro-batches come from one run.

In: a trainer. Out: its `OwnLosses`, or None for the stock loss of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

from torch import Tensor


class OwnLosses(Protocol):
    """The losses of a trainer with a `compute_loss` of its own, and what it records with them."""

    def reason_against(self) -> str:
        """Return why losses have to be computed once for every micro-batch, "" if one run for several is the same."""
        ...

    def has_step(self, step: Any) -> bool:
        """Return whether a training step is this kind of trainer's own, which is known."""
        ...

    def begin(self) -> None:
        """Begin a step: what an unfinished one has left is dropped."""
        ...

    def of(self, count: int, parts: list[Tensor], lengths: Sequence[int] = ()) -> AbstractContextManager[None]:
        """Let the trainer's step of a batch of `count` micro-batches add their losses (count,) to `parts`.

        `lengths` are those of micro-batches that are padded to the longest one. The step's loss is 1 with the gradient
        of their sum (`chunked_loss.unit_sum`).
        """
        ...

    def finish(self) -> None:
        """Record what the trainer records of the step's micro-batches that ran this way."""
        ...


def own_losses_of(trainer: Any) -> OwnLosses | None:
    """Return the losses that a trainer computes itself, None if it has the stock one or losses that are not known."""
    return cast("OwnLosses | None", getattr(trainer, "own_losses", None))

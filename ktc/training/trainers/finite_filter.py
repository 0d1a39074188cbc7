"""The check of a trainer whether losses are finite, left out for the zeros of micro-batches that wait for their step.

In: the arguments of a trainer. Out: the same, with `logging_nan_inf_filter` off between a waiting micro-batch and the
trainer's check of its loss. With it `Trainer` reads two flags of each loss from the GPU, 4 ms of a step of 16, before
the step has begun.
"""

from __future__ import annotations

from typing import Any


class FiniteFilter:
    """The filter of one trainer. Outside of a waiting micro-batch it is the user's."""

    def __init__(self, args: Any) -> None:
        self._args = args
        self._left_out = False

    def leave_out(self) -> None:
        """Leave the check of this micro-batch's loss out, which is zero."""
        self._left_out = bool(getattr(self._args, "logging_nan_inf_filter", False))
        if self._left_out:
            self._args.logging_nan_inf_filter = False

    def restore(self) -> None:
        """Let the next loss be checked, if the user's arguments say so."""
        if self._left_out:
            self._args.logging_nan_inf_filter, self._left_out = True, False

"""`Chosen`: the positions of a cache that new tokens attend to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Chosen:
    """Ascending `positions` (B, T, S, M) in int32, of which the first `counts` (B, T, S) are chosen, contiguous both.

    S is the number of query heads, or of key heads where the query heads of one share a choice.
    """

    positions: Tensor
    counts: Tensor

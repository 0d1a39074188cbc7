"""The sizes of latent attention, and the number of new tokens from which expanded keys take fewer FLOPs."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """H heads; the widths of a query without (n) and with (r) rotary positions, of a value (v), of a latent (c)."""

    heads: int
    nope: int
    rope: int
    value: int
    latent: int

    def break_even(self, positions: int) -> float:
        """Return the number of new tokens below which absorbed attention over `positions` takes fewer FLOPs.

        Expanding all positions costs 2 L c H (n + v); absorbed scores and sums cost 2 T L H (2c - n - v) more, and the
        absorbed projections of new tokens 2 T c H (n + v).
        """
        expand = self.latent * (self.nope + self.value)
        more = positions * (2 * self.latent - self.nope - self.value)
        return expand * positions / (expand + more) if expand + more > 0 else math.inf

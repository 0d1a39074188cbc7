"""Processes with a GPU each share the streamed experts of a layer: each receives its own through its own bus.

In: the rows of every process, in any number. Each process multiplies its experts by the rows of all of them, and
gets the sums of its own rows. Gradients of factors are of all rows, for its experts alone, and zero for the others: the
mean over the processes is that of unshared experts.
Every process calls each layer in the same order, forward and backward, and as often.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor

# Collectives of one tensor, by their newest name and by that of older releases.
_dist: Final = cast("Any", dist)
_gather: Final = getattr(_dist, "all_gather_single", None) or _dist.all_gather_into_tensor
_reduce: Final = getattr(_dist, "reduce_scatter_single", None) or _dist.reduce_scatter_tensor


@dataclass(slots=True, eq=False)
class Sharing:
    """Process `rank` of `size` in a `group` that exchanges tensors of their devices. It shares while `on`."""

    group: Any
    rank: int
    size: int
    on: bool = False

    def share(self, experts: int) -> range:
        """Return the neighbours that this process multiplies, of at least `size` experts."""
        return range(experts * self.rank // self.size, experts * (self.rank + 1) // self.size)

    def exchange(self, rows: int, device: torch.device) -> Exchange:
        """Learn how many rows each process has in a call. Waits for the device."""
        counts = torch.empty(self.size, dtype=torch.int64, device=device)
        _gather(counts, torch.tensor([rows], device=device), group=self.group)
        return Exchange(self, tuple(cast("list[int]", cast("Any", counts).tolist())))


@dataclass(frozen=True, slots=True)
class Exchange:
    """One call: process r has `counts[r]` rows."""

    sharing: Sharing
    counts: tuple[int, ...]

    def gathered(self, rows: Tensor) -> Tensor:
        """Return the rows of all processes, in their order: (R, ...) -> (all R, ...)."""
        most = max(self.counts)
        every = rows.new_empty((self.sharing.size * most, *rows.shape[1:]))
        _gather(every, _padded(rows, most).contiguous(), group=self.sharing.group)
        if min(self.counts) == most:
            return every
        parts = torch.split(every, most)
        return torch.cat([part[:count] for part, count in zip(parts, self.counts, strict=True)])

    def own(self, terms: Tensor) -> Tensor:
        """Return the sums of this process's rows over the terms of all processes: (all R, ...) -> (R, ...)."""
        most, count = max(self.counts), self.counts[self.sharing.rank]
        if min(self.counts) < most:
            terms = torch.cat([_padded(part, most) for part in torch.split(terms, list(self.counts))])
        sums = terms.new_empty((most, *terms.shape[1:]))
        _reduce(sums, terms.contiguous(), group=self.sharing.group)
        return sums[:count]


def _padded(rows: Tensor, most: int) -> Tensor:
    """Return the rows with further ones behind them, whose values do not count, up to `most`."""
    missing = most - len(rows)
    return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))]) if missing else rows

"""`CacheSize`: the bytes that keys and values of sequences take, by their lengths."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

_UNBOUNDED: Final = 1 << 40  # tokens: no sequence is as long

Shape = Callable[[int, int], tuple[int, int]]
"""From the number of rows and the length of the longest to the slots and positions of memory at fixed addresses."""
LayerSize = tuple[int, int | None]
"""Bytes per token of a layer, and the number of last tokens that it keeps; None keeps all."""


@dataclass(frozen=True, slots=True)
class CacheSize:
    """`paged` layers take what a sequence needs. In `contiguous` ones a row is as wide as the longest of its batch.

    With a `shape` all layers are in memory at fixed addresses, which has every position of windows too.
    """

    paged: tuple[LayerSize, ...] = ()
    contiguous: tuple[LayerSize, ...] = ()
    shape: Shape | None = None

    @property
    def has_windows(self) -> bool:
        """Whether a layer keeps the last tokens only."""
        return any(window is not None for _, window in (*self.paged, *self.contiguous))

    def nbytes(self, tokens: int) -> int:
        """Return the bytes of one sequence."""
        return self.batch_nbytes([tokens])

    def batch_nbytes(self, lengths: Sequence[int]) -> int:
        """Return the bytes of the sequences of one batch."""
        if self.shape is not None and lengths:
            slots, positions = self.shape(len(lengths), max(lengths))
            return slots * positions * sum(nbytes for nbytes, _ in (*self.paged, *self.contiguous))
        in_pages = sum(_nbytes(self.paged, length) for length in lengths)
        return in_pages + len(lengths) * _nbytes(self.contiguous, max(lengths, default=0))

    def max_tokens(self, nbytes: int) -> int | None:
        """Return the length of the longest sequence within a number of bytes; None if every length fits."""
        if self.nbytes(_UNBOUNDED) <= nbytes:
            return None
        return bisect_right(range(_UNBOUNDED), nbytes, key=self.nbytes) - 1


def _nbytes(layers: Sequence[LayerSize], tokens: int) -> int:
    return sum(nbytes * (tokens if window is None else min(tokens, window)) for nbytes, window in layers)

"""`ContiguousKV`: keys or values of several sequences in one block of memory, aligned at their last token.

In: rows (heads, length, width), then (rows, heads, T, width) for all of them. Out: views of the memory. Sequences join
and leave without a copy of the others. Columns that no row has are zeros or older values, always finite.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from ktc.model.experts.layouts.packed import zeros_on_huge_pages

ROOM: Final = 256  # columns: the steps between two copies of all rows


class ContiguousKV:
    """Memory (slots, heads, columns, width). Rows are the first slots, and their last token is in column `end` - 1."""

    def __init__(self, like: Tensor, room: int = ROOM) -> None:
        """Make an empty one for rows such as `like` (heads, any length, width), with `room` for further columns."""
        self._room, self.rows, self.left, self.end = room, 0, 0, 0
        self._memory = like.new_zeros((0, like.shape[0], 0, like.shape[2]))

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    @property
    def width(self) -> int:
        """The number of columns in use."""
        return self.end - self.left

    def view(self) -> Tensor:
        """Return all rows, (rows, heads, columns in use, width of a key)."""
        return self._memory[: self.rows, :, self.left : self.end]

    def row(self, at: int, length: int) -> Tensor:
        """Return the last `length` columns of a row."""
        return self._memory[at, :, self.end - length : self.end]

    def join(self, row: Tensor) -> None:
        """Add a row (heads, length, width) after the others."""
        length = row.shape[1]
        slots = self._memory.shape[0]
        if self.rows == slots or length > self.end:
            grown = slots + slots // 4 + 1 if self.rows == slots else slots
            # With room at the left as well: rows of growing lengths would move all others at every join.
            width = max(self.width, length)
            self._relocate(grown, width + max(width // 8, self._room // 4))
        self.left = min(self.left, self.end - length) if self.rows else self.end - length
        self._memory[self.rows].zero_()
        self._memory[self.rows, :, self.end - length : self.end] = row
        self.rows += 1

    def leave(self, at: int) -> None:
        """Remove a row: the last one takes its slot."""
        self.rows -= 1
        if at != self.rows:
            self._memory[at, :, self.left : self.end] = self._memory[self.rows, :, self.left : self.end]

    def trim(self, width: int) -> None:
        """Keep the last `width` columns of all rows."""
        self.left = max(self.left, self.end - width)

    def clear(self) -> None:
        """Remove all rows."""
        self.rows = self.left = self.end = 0

    def append(self, new: Tensor) -> Tensor:
        """Append (rows, heads, T, width) and return all columns."""
        tokens = new.shape[2]
        if self.end + tokens > self._memory.shape[2]:
            self._relocate(self._memory.shape[0], self.width)
        self._memory[: self.rows, :, self.end : self.end + tokens] = new
        self.end += tokens
        return self.view()

    def _relocate(self, slots: int, width: int) -> None:
        """Copy the rows to memory with `width` columns at its left and room behind them."""
        _, heads, _, size = self._memory.shape
        rows, used = self.view(), self.width
        self._memory = zeros_on_huge_pages((slots, heads, width + self._room, size), self._memory)
        self._memory[: self.rows, :, width - used : width] = rows
        self.left, self.end = width - used, width

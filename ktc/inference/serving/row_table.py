"""`RowTable`: where the rows of a batch are in a pool of pages, and where a step writes their next tokens.

In: the pages of rows that join, leave and grow. Out: tensors at addresses that change only when the table grows, for
kernels and for programs of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ktc.inference.serving.pages import Page
from ktc.model.attention.paged_tensor import PAGE, PageTable


class RowTable:
    """`pages` int32 (slots, most), `lengths` int64 (slots,) with the token of the step. Rows are the first slots."""

    def __init__(self, heads: Sequence[int]) -> None:
        """Make an empty table for layers with these numbers of key heads."""
        self.rows: list[list[Page]] = []
        self._heads = sorted(set(heads))
        self.pages = torch.zeros((0, 0), dtype=torch.int32)
        self.lengths = torch.zeros(0, dtype=torch.int64)
        self._places: dict[int, Tensor] = {}

    @property
    def columns(self) -> int:
        """The positions that the longest row has room for."""
        return self.pages.shape[1] * PAGE

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The memory of the table."""
        return self.pages, self.lengths, *self._places.values()

    def join(self, pages: Sequence[Page]) -> None:
        """Add a row after the others."""
        self.rows.append(list(pages))
        self._write(len(self.rows) - 1)

    def leave(self, at: int) -> None:
        """Remove a row; the last one takes its place."""
        self.rows[at] = self.rows[-1]
        self.rows.pop()
        if at < len(self.rows):
            self._write(at)

    def grow(self, at: int, page: Page) -> None:
        """Add a page to a row."""
        self.rows[at].append(page)
        self._write(at)

    def renew(self) -> None:
        """Read the numbers of all pages again, after they have changed."""
        for at in range(len(self.rows)):
            self._write(at)

    def step(self, lengths: Sequence[int]) -> None:
        """Set the lengths with the next token of every row, and the places of these tokens."""
        rows = len(lengths)
        last = torch.tensor(lengths)
        self.lengths[:rows] = last + 1
        pages = self.pages[torch.arange(rows), last // PAGE].long()
        for heads, places in self._places.items():
            of_heads = pages[:, None] * heads + torch.arange(heads)
            places[: rows * heads] = (of_heads * PAGE + (last % PAGE)[:, None]).flatten()

    def of(self, rows: int) -> PageTable:
        """Return the first rows."""
        return PageTable(self.pages[:rows], self.lengths[:rows])

    def places(self, heads: int, rows: int) -> Tensor:
        """Return where the tokens of a step are among the rows of memory (pages * heads * PAGE, width)."""
        return self._places[heads][: rows * heads]

    def _write(self, at: int) -> None:
        row = self.rows[at]
        slots, most = self.pages.shape
        if len(self.rows) > slots or len(row) > most:
            slots, most = _rounded(max(len(self.rows), slots)), _rounded(max(len(row), most))
            self.pages = torch.zeros((slots, most), dtype=torch.int32)
            self.lengths = torch.zeros(slots, dtype=torch.int64)
            self._places = {heads: torch.zeros(slots * heads, dtype=torch.int64) for heads in self._heads}
            self.renew()
        self.pages[at, : len(row)] = torch.tensor([page.number for page in row], dtype=torch.int32)


def _rounded(number: int) -> int:
    """Return a power of two that is not smaller, at least 2 so that a first row seldom moves the table."""
    return max(2, 1 << (number - 1).bit_length())

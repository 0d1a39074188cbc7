"""The layers of a `RowCache`: rows in pages, rows side by side, and the last tokens of rows in a window.

In: rows that join and leave, and (rows, heads, 1, width) of a step. Out: keys and values of all rows, aligned at their
last token.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from ktc.inference.serving.contiguous_kv import ContiguousKV
from ktc.inference.serving.pages import LayerRow, PageMemory
from ktc.inference.serving.row_table import RowTable
from ktc.model.attention.row_indices import RowIndices

KeysValues = tuple[PageMemory, PageMemory]


class PagedLayer(DynamicLayer):
    """A layer whose rows are in pages. The rows of the table join and leave, and have a place for the next token."""

    nbytes = 0  # pages are counted by their pool

    def __init__(self, memories: KeysValues, table: RowTable) -> None:
        super().__init__()
        self._memories, self._table, self._columns = memories, table, 0
        self.is_initialized = True

    def keep(self, rows: int) -> None:
        """Do nothing: the table has the rows."""

    def set_columns(self, columns: int) -> None:
        """Follow the longest row."""
        self._columns = columns

    def get_seq_length(self) -> int:
        return self._columns

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write a token of every row, (rows, heads, 1, width), and return all keys and values."""
        self._columns += 1
        return written(self._memories, self._table, key_states, value_states, self._columns)


def written(
    memories: KeysValues, table: RowTable, keys: Tensor, values: Tensor, columns: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write a token of every row where the table says, and return the rows with it, (rows, heads, columns, width)."""
    rows = keys.shape[0]
    for memory, new in zip(memories, (keys, values), strict=True):
        memory.append(new, table.places(new.shape[1], rows))
    of_rows = table.of(rows)
    return memories[0].rows(of_rows, columns), memories[1].rows(of_rows, columns)


class PagedStepLayer(StaticLayer):
    """The same for a step that is recorded: rows of the table end in the last of `columns`, which is `position`."""

    def __init__(self, memories: KeysValues, table: RowTable, position: Tensor, columns: int) -> None:
        super().__init__(columns)
        self._memories, self._table, self._position = memories, table, position
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write a token of every row, (rows, heads, 1, width), and return the rows of the table."""
        return written(self._memories, self._table, key_states, value_states, self.max_cache_len)

    def get_seq_length(self, *args: Any) -> Any:
        """Return the position, a tensor: what a model computes from it is part of the step."""
        return self._position[0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns, and the first of them."""
        return self.max_cache_len, 0


class _Rows:
    """Keys and values of rows side by side: `kv` is empty until a row with content joins."""

    kv: tuple[ContiguousKV, ...] = ()
    _room: int
    is_initialized: bool

    @property
    def nbytes(self) -> int:
        """The bytes of all rows, with the room that they have."""
        return sum(side.nbytes for side in self.kv)

    def join(self, row: LayerRow) -> None:
        """Add a row after the others."""
        if not self.kv:
            self.kv = tuple(ContiguousKV(tensor, self._room) for tensor in row)
            self.is_initialized = True
        for side, tensor in zip(self.kv, row, strict=True):
            side.join(tensor)

    def leave(self, at: int) -> None:
        """Remove a row; the last one takes its place."""
        for side in self.kv:
            side.leave(at)

    def keep(self, rows: int) -> None:
        """Remove what a failed `join` has added behind this many rows."""
        for side in self.kv:
            if side.rows > rows:
                side.leave(rows)

    def row(self, at: int, length: int) -> LayerRow | None:
        """Return a row, as views."""
        return LayerRow(*(side.row(at, min(length, side.width)) for side in self.kv)) if self.kv else None

    def _appended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.kv[0].append(keys), self.kv[1].append(values)


class RowLayer(_Rows, DynamicLayer):
    """A layer that keeps every token. Sparse attention keeps the index of every row in `row_indices`."""

    def __init__(self, room: int) -> None:
        DynamicLayer.__init__(self)
        self._room, self._columns = room, 0
        self.row_indices = RowIndices()

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.row_indices.nbytes

    def join(self, row: LayerRow) -> None:
        super().join(row)
        self.row_indices.join()

    def leave(self, at: int) -> None:
        super().leave(at)
        if self.is_initialized:
            self.row_indices.leave(at)

    def keep(self, rows: int) -> None:
        super().keep(rows)
        del self.row_indices.rows[rows:]

    def set_columns(self, columns: int) -> None:
        """Keep the columns that a row still has."""
        self._columns = columns
        self.keys = self.values = None  # they would keep memory that the rows have left
        for side in self.kv:
            side.trim(columns)
            if not side.rows:
                side.clear()

    def get_seq_length(self) -> int:
        return self._columns

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append (rows, heads, T, width), and return all keys and values."""
        self._columns += key_states.shape[2]
        self.keys, self.values = self._appended(key_states, value_states)
        return self.keys, self.values


class SlidingRowLayer(_Rows, DynamicSlidingWindowLayer):
    """A layer that keeps the last `window` - 1 tokens."""

    def __init__(self, window: int, room: int) -> None:
        DynamicSlidingWindowLayer.__init__(self, sliding_window=window)
        self._room = room

    def set_columns(self, columns: int) -> None:
        """Keep the columns that a row still has."""
        self.cumulative_length = columns
        for side in self.kv:
            side.trim(min(columns, self.sliding_window - 1))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append (rows, heads, T, width), and return the keys and values before and in it."""
        self.cumulative_length += key_states.shape[2]
        both = self._appended(key_states, value_states)
        for side in self.kv:
            side.trim(self.sliding_window - 1)
        return both

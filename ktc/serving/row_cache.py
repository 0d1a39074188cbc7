"""`RowCache`: the cache of a running batch, which sequences join and leave.

In: a sequence's keys and values, as a cache of transformers made them, one tensor per layer. Out: a `DynamicCache` of
all of them, aligned at the last token, so masks and windows are those of a batch that is padded on the left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ktc.attention.row_indices import RowIndices
from ktc.serving.band import ROOM, Band
from ktc.serving.int8_band import Int8Band, band_for


class LayerRow(NamedTuple):
    """Keys and values (heads, length, width) of one sequence in one layer; a window keeps its last tokens only."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class CachedRow:
    """One sequence of `length` tokens in all layers; None for a layer that shares another's keys."""

    length: int
    layers: tuple[LayerRow | None, ...]
    windows: tuple[int | None, ...]  # of each layer; None keeps every token

    @property
    def nbytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers if layer is not None)

    @property
    def is_whole(self) -> bool:
        """Whether every layer holds every token, so that the row can be shortened."""
        return all(layer is None or layer.keys.shape[1] == self.length for layer in self.layers)

    def first(self, length: int) -> CachedRow:
        """Return the first `length` tokens, as views. The row must be whole, or the length its own."""
        layers = tuple(layer and LayerRow(*(each[:, :length] for each in layer)) for layer in self.layers)
        return self if length == self.length else CachedRow(length, layers, self.windows)

    def clone(self) -> CachedRow:
        """Return a copy that holds no other sequence's memory."""
        layers = tuple(layer and LayerRow(*(each.clone() for each in layer)) for layer in self.layers)
        return CachedRow(self.length, layers, self.windows)


def window_of(layer: Any) -> int | None:
    """Return the sliding window of a layer of a cache, None where it keeps every token."""
    return int(layer.sliding_window) if isinstance(layer, DynamicSlidingWindowLayer) else None


def cached_row(cache: DynamicCache, at: int, kept: Tensor | None, length: int) -> CachedRow:
    """Return one sequence of a cache of transformers. `kept` are its columns, None for the last `length`."""
    layers = cast("list[Any]", cache.layers)
    return CachedRow(
        length, tuple(_layer_row(each, at, kept, length) for each in layers), tuple(map(window_of, layers))
    )


def _layer_row(layer: Any, at: int, kept: Tensor | None, length: int) -> LayerRow | None:
    if not layer.is_initialized:
        return None
    if kept is not None:
        return LayerRow(layer.keys[at].index_select(1, kept), layer.values[at].index_select(1, kept))
    return LayerRow(layer.keys[at, :, -length:], layer.values[at, :, -length:])


class RowCache:
    """The rows of a batch in one `cache`; each is as long as its sequence, and `columns` as the longest.

    A `steady` one keeps its memory when the last row leaves (`Band`).
    """

    def __init__(self, room: int = ROOM, steady: int = 0) -> None:
        self.cache = DynamicCache()
        self.lengths: list[int] = []
        self._room, self._steady = room, steady

    @property
    def columns(self) -> int:
        return max(self.lengths, default=0)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self._layers)

    @property
    def _layers(self) -> Sequence[RowLayer | SlidingRowLayer]:
        return cast("Any", self.cache.layers)

    def join(self, row: CachedRow) -> None:
        """Add a sequence after the others."""
        if not self._layers:
            made = [RowLayer(self._room, self._steady) if window is None else SlidingRowLayer(window, self._room)
                    for window in row.windows]  # fmt: skip
            cast("Any", self.cache).layers = made
        self.lengths.append(row.length)
        for layer, content in zip(self._layers, row.layers, strict=True):
            if content is not None:
                layer.join(content)
            layer.set_columns(self.columns)

    def leave(self, at: int) -> None:
        """Remove a sequence; the last one takes its place."""
        self.lengths[at] = self.lengths[-1]
        self.lengths.pop()
        if not self.lengths and not self._steady:
            self.cache = DynamicCache()
        for layer in self._layers:
            layer.leave(at)
            layer.set_columns(self.columns)

    def bands(self) -> tuple[tuple[Band, Band], ...] | None:
        """Return the keys and values of all layers, None where a layer has none of its own, a window, or codes."""
        layers = [layer.bands if isinstance(layer, RowLayer) else () for layer in self._layers]
        found = [[band for band in bands if isinstance(band, Band)] for bands in layers]
        return tuple((each[0], each[1]) for each in found if len(each) == 2) if all(map(len, found)) else None

    def row(self, at: int) -> CachedRow:
        """Return a copy of a sequence."""
        length = self.lengths[at]
        layers = self._layers
        return CachedRow(length, tuple(each.row(at, length) for each in layers), tuple(map(window_of, layers))).clone()

    def appended(self) -> None:
        """Count the token that a forward pass has appended to every sequence."""
        self.lengths = [length + 1 for length in self.lengths]

    def written(self) -> None:
        """Count the token that a native step has written behind every sequence, into all `bands`."""
        for layer in self._layers:
            if isinstance(layer, RowLayer):
                layer.written()
        self.appended()


class _Rows:
    """The bands of a layer; empty until a row with content joins."""

    _keys: Band | Int8Band | None
    _values: Band | Int8Band | None
    _room: int
    _steady = 0
    is_initialized: bool

    @property
    def nbytes(self) -> int:
        return sum(band.nbytes for band in self.bands)

    @property
    def bands(self) -> tuple[Band | Int8Band, ...]:
        """Keys and values, nothing before a row with content."""
        return () if self._keys is None or self._values is None else (self._keys, self._values)

    def join(self, row: LayerRow) -> None:
        if self._keys is None or self._values is None:
            self._keys, self._values = (band_for(each, self._room, self._steady) for each in row)
            self.is_initialized = True
        self._keys.join(row.keys)
        self._values.join(row.values)

    def leave(self, at: int) -> None:
        for band in self.bands:
            band.leave(at)

    def row(self, at: int, length: int) -> LayerRow | None:
        if self._keys is None or self._values is None:
            return None
        kept = min(length, self._keys.width)
        return LayerRow(self._keys.row(at, kept), self._values.row(at, kept))


class RowLayer(_Rows, DynamicLayer):
    """A layer that keeps every token. Sparse attention keeps the index of every row in `row_indices`."""

    def __init__(self, room: int, steady: int = 0) -> None:
        DynamicLayer.__init__(self)
        self._keys = self._values = None
        self._room, self._steady = room, steady
        self._columns = 0
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

    def set_columns(self, columns: int) -> None:
        """Keep the columns that a row still has."""
        self._columns = columns
        self.keys = self.values = None  # they would keep memory that the bands have left
        for band in self.bands:
            band.trim(columns)
            if not band.rows:
                band.clear()

    def written(self) -> None:
        """Take a column that was written behind the last one."""
        self._columns += 1
        for band in self.bands:
            assert isinstance(band, Band), "native steps write no codes"
            band.end += 1

    def get_seq_length(self) -> int:
        return self._columns

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append (rows, heads, T, width), and return all keys and values."""
        assert self._keys is not None and self._values is not None
        self._columns += key_states.shape[2]
        self.keys, self.values = self._keys.append(key_states), self._values.append(value_states)
        return self.keys, self.values


class SlidingRowLayer(_Rows, DynamicSlidingWindowLayer):
    """A layer that keeps the last `window` - 1 tokens."""

    def __init__(self, window: int, room: int) -> None:
        DynamicSlidingWindowLayer.__init__(self, sliding_window=window)
        self._keys = self._values = None
        self._room = room

    def set_columns(self, columns: int) -> None:
        """Keep the columns that a row still has."""
        self.cumulative_length = columns
        for band in self.bands:
            band.trim(min(columns, self.sliding_window - 1))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append (rows, heads, T, width), and return the keys and values before and in it."""
        assert self._keys is not None and self._values is not None
        self.cumulative_length += key_states.shape[2]
        found = self._keys.append(key_states), self._values.append(value_states)
        for band in self.bands:
            band.trim(self.sliding_window - 1)
        return found

"""`RowCache`: the cache of a running batch, which sequences join and leave.

In: a sequence's keys and values, as a cache of transformers made them, one tensor per layer. Out: a `DynamicCache` of
all of them, aligned at the last token, so masks and windows are those of a batch that is padded on the left. Layers
whose attention reads pages have a pool of them, of which sequences with the same beginning share those that are full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast
from weakref import WeakSet

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from ktc.inference.serving.contiguous_kv import ROOM
from ktc.inference.serving.pages import LayerRow, Page, PagePool
from ktc.inference.serving.row_layers import PagedLayer, RowLayer, SlidingRowLayer
from ktc.inference.serving.row_table import RowTable
from ktc.model.attention.decode import DecodeAttention
from ktc.model.attention.paged_tensor import PAGE


@dataclass(frozen=True, slots=True)
class PooledPages:
    """The pages of a sequence in a pool."""

    pool: PagePool
    pages: tuple[Page, ...]


@dataclass(frozen=True, slots=True)
class CachedRow:
    """One sequence of `length` tokens in all layers; None for a layer that shares another's keys, or is in `pooled`."""

    length: int
    layers: tuple[LayerRow | None, ...]
    windows: tuple[int | None, ...]  # of each layer; None keeps every token
    pooled: PooledPages | None = None

    @property
    def tensor_bytes(self) -> int:
        """The bytes of what is not in pages."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers if layer is not None)

    @property
    def pages(self) -> tuple[Page, ...]:
        """The pages that hold the row, if any."""
        return () if self.pooled is None else self.pooled.pages

    @property
    def page_bytes(self) -> int:
        """The bytes of one of its pages."""
        return 0 if self.pooled is None else self.pooled.pool.page_bytes

    @property
    def is_whole(self) -> bool:
        """Whether every layer holds every token, so that the row can be shortened."""
        return all(layer is None or layer.keys.shape[1] == self.length for layer in self.layers)

    def layer(self, index: int) -> LayerRow | None:
        """Return the keys and values of a layer; those in pages are copied."""
        if self.pooled is not None and index in self.pooled.pool.layers:
            return self.pooled.pool.read(index, self.pooled.pages, self.length)
        return self.layers[index]

    def first(self, length: int) -> CachedRow:
        """Return the first `length` tokens, as views. The row must be whole, or the length its own."""
        if length == self.length:
            return self
        layers = tuple(layer and LayerRow(*(tensor[:, :length] for tensor in layer)) for layer in self.layers)
        in_pool = self.pooled and replace(self.pooled, pages=self.pooled.pages[: -(-length // PAGE)])
        return CachedRow(length, layers, self.windows, in_pool)

    def clone(self) -> CachedRow:
        """Return a copy that holds no other sequence's memory; pages stay the same ones."""
        layers = tuple(layer and LayerRow(*(tensor.clone() for tensor in layer)) for layer in self.layers)
        return CachedRow(self.length, layers, self.windows, self.pooled)


def window_of(layer: Any) -> int | None:
    """Return the sliding window of a layer of a cache, None where it keeps every token."""
    return int(layer.sliding_window) if isinstance(layer, DynamicSlidingWindowLayer) else None


def cached_row(cache: DynamicCache, at: int, kept: Tensor | None, length: int) -> CachedRow:
    """Return one sequence of a cache of transformers. `kept` are its columns, None for the last `length`."""
    layers = cast("list[Any]", cache.layers)
    return CachedRow(
        length, tuple(_layer_row(layer, at, kept, length) for layer in layers), tuple(map(window_of, layers))
    )


def _layer_row(layer: Any, at: int, kept: Tensor | None, length: int) -> LayerRow | None:
    if not layer.is_initialized:
        return None
    if kept is not None:
        return LayerRow(layer.keys[at].index_select(1, kept), layer.values[at].index_select(1, kept))
    return LayerRow(layer.keys[at, :, -length:], layer.values[at, :, -length:])


class RowCache:
    """The rows of a batch in one `cache`; each is as long as its sequence, and `columns` as the longest.

    `paged` are the layers whose attention reads pages. Their pool stays when the last row leaves.
    """

    def __init__(self, paged: Mapping[int, DecodeAttention] | None = None, room: int = ROOM) -> None:
        self.cache = DynamicCache()
        self.lengths: list[int] = []
        self.pool: PagePool | None = None
        self.table = RowTable(())
        self._paged, self._room = paged or {}, room
        self._begun: WeakSet[Page] = WeakSet()  # pages that a row of this cache writes or has written

    @property
    def columns(self) -> int:
        """The number of tokens of the longest row."""
        return max(self.lengths, default=0)

    @property
    def nbytes(self) -> int:
        """The memory of the rows, with the room that contiguous layers have."""
        pages = {page for row in self.table.rows for page in row}
        in_pages = 0 if self.pool is None else len(pages) * self.pool.page_bytes
        return in_pages + sum(layer.nbytes for layer in self._layers)

    @property
    def _layers(self) -> Sequence[PagedLayer | RowLayer | SlidingRowLayer]:
        return cast("Any", self.cache.layers)

    @property
    def is_in_pages(self) -> bool:
        """Whether all layers with rows are in pages."""
        return self.pool is not None and all(isinstance(layer, PagedLayer) for layer in self._layers)

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """The tensors whose addresses a recorded step of rows in pages has."""
        return self.table.tensors if self.pool is None else (*self.table.tensors, *self.pool.tensors)

    def hold(self, row: CachedRow, beginning: CachedRow | None = None) -> CachedRow:
        """Return a row for `join` and for later requests; it may join once.

        Where it is in pages, it shares those that `beginning`, its first tokens, fills. Other layers are copied.
        """
        layers = enumerate(zip(row.layers, row.windows, strict=True))
        in_pages = {
            index: layer
            for index, (layer, window) in layers
            if layer is not None and window is None and index in self._paged
        }
        if not in_pages:
            return row.clone()
        if self.pool is None:
            self.pool = PagePool(in_pages, self._paged)
            self.table = RowTable([tensor.shape[0] for layer in in_pages.values() for tensor in layer])
        shared: tuple[Page, ...] = ()
        if beginning is not None and beginning.pooled is not None and beginning.pooled.pool is self.pool:
            shared = beginning.pages[: beginning.length // PAGE]
        pages = self.pool.store(in_pages, row.length, shared)
        others = tuple(None if index in in_pages else layer for index, layer in enumerate(row.layers))
        return replace(CachedRow(row.length, others, row.windows).clone(), pooled=PooledPages(self.pool, pages))

    def join(self, row: CachedRow) -> None:
        """Add a sequence after the others. Where it fails, as for missing memory, the others stay as they are."""
        if row.pooled is None and self._paged:
            row = self.hold(row)
        if row.length % PAGE and row.pooled is not None:
            assert row.pages[-1] not in self._begun, "two sequences would write into one page"
            self._begun.add(row.pages[-1])
        if not self._layers:
            cast("Any", self.cache).layers = [self._layer(row, index) for index in range(len(row.layers))]
        try:
            self._add(row)
        except BaseException:
            rows = len(self.lengths)
            del self.table.rows[rows:]
            for layer in self._layers:
                layer.keep(rows)
                layer.set_columns(self.columns)
            raise
        self.lengths.append(row.length)
        for layer in self._layers:
            layer.set_columns(self.columns)

    def _add(self, row: CachedRow) -> None:
        if row.pooled is not None:
            self.table.join(row.pooled.pages)
        for layer, content in zip(self._layers, row.layers, strict=True):
            if content is not None:
                assert not isinstance(layer, PagedLayer)
                layer.join(content)

    def leave(self, at: int) -> None:
        """Remove a sequence; the last one takes its place."""
        self.lengths[at] = self.lengths[-1]
        self.lengths.pop()
        if self.pool is not None:
            self.table.leave(at)
        if not self.lengths:
            self.cache = DynamicCache()
        for layer in self._layers:
            if not isinstance(layer, PagedLayer):
                layer.leave(at)
            layer.set_columns(self.columns)

    def clear(self) -> None:
        """Remove all sequences."""
        self.lengths.clear()
        self.table.rows.clear()
        self.cache = DynamicCache()

    def row(self, at: int) -> CachedRow:
        """Return a sequence: a copy, or its pages, into which no other row may write."""
        length = self.lengths[at]
        rows = tuple(None if isinstance(layer, PagedLayer) else layer.row(at, length) for layer in self._layers)
        in_pool = None if self.pool is None else PooledPages(self.pool, tuple(self.table.rows[at]))
        return CachedRow(length, rows, tuple(map(window_of, self._layers)), in_pool).clone()

    def begin_step(self) -> None:
        """Make room in pages for the next token of every sequence."""
        if self.pool is None:
            return
        full = [at for at, length in enumerate(self.lengths) if length == len(self.table.rows[at]) * PAGE]
        for at, page in zip(full, self.pool.take(len(full)), strict=True):
            self.table.grow(at, page)
        self.table.step(self.lengths)

    def appended(self) -> None:
        """Count the token that a step has appended to every sequence."""
        self.lengths = [length + 1 for length in self.lengths]
        for layer in self._layers:
            if isinstance(layer, PagedLayer):
                layer.set_columns(self.columns)

    def compact(self) -> None:
        """Release memory that no page needs."""
        if self.pool is not None:
            try:
                self.pool.compact()
            finally:  # pages have other numbers, also where memory was missing for a smaller pool
                self.table.renew()

    def _layer(self, row: CachedRow, index: int) -> PagedLayer | RowLayer | SlidingRowLayer:
        if self.pool is not None and index in self.pool.layers:
            return PagedLayer(self.pool.layers[index], self.table)
        window = row.windows[index]
        return RowLayer(self._room) if window is None else SlidingRowLayer(window, self._room)

"""`Sparse`: attention of few new tokens over the positions of a cache that an index, or a model's own indexer, chooses.

In: queries and what the cache holds, in calls of a stock module whose cache layer is followed. Out: attention's output,
or None for a call that stays dense: up to `budget` positions, many tokens, gradients, caches that no index follows.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from ktc.model.attention.chosen import Chosen
from ktc.model.attention.decode import MOST_TOKENS, DecodeAttention, Heads
from ktc.model.attention.index_kernel import IndexKernel
from ktc.model.attention.key_codes import estimates
from ktc.model.attention.key_index import KeyIndex, index_of, is_followed, keep_index, length_of
from ktc.model.attention.row_indices import RowIndices, every_position, joined, row_lengths, row_of
from ktc.model.attention.selection import attend_chosen, choose, visible_positions
from ktc.model.attention.sparsity import Sparsity, Traffic
from ktc.model.linears.gemv import is_traced

log = logging.getLogger(__name__)
_CACHE: Final = "past_key_values"


@dataclass(slots=True)
class _Followed:
    """A cache layer during one call of its module: its index as it was before, and how many positions it held."""

    cache: Any
    number: int
    index: KeyIndex | None
    before: int

    @property
    def layer(self) -> Any:
        layers = getattr(self.cache, "layers", ())
        return layers[self.number] if self.number < len(layers) else None


_FOLLOWED: Final[ContextVar[_Followed | None]] = ContextVar("followed cache layer", default=None)


@dataclass(frozen=True, slots=True)
class Sparse:
    """The sparse attention of a module. `decode` is a kernel of both kinds; without one, PyTorch computes.

    `indexer` says that the model's own indexer chooses.
    """

    sparsity: Sparsity
    decode: DecodeAttention | None
    indexer: bool = False

    def attend(
        self, module: Any, query: Tensor, heads: Heads, *, scale: float, mask: Tensor | None,
        sinks: Tensor | None = None, indices: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Compute query (B, H, T, k) -> (B, T, H, v), or return None for a call that stays dense.

        `mask` is bool, (B or 1, 1, T, L); `indices` (B, T, K) are the choice of the model's indexer.
        """
        bool_mask = mask is None or (mask.dtype == torch.bool and mask.dim() == 4 and mask.shape[1] == 1)
        if torch.is_grad_enabled() or query.shape[2] > MOST_TOKENS or is_traced() or not bool_mask:
            return None
        native = self.decode is not None and self.decode.serves(query, heads, mask)
        if indices is not None:
            chosen = _of_indexer(indices, heads, mask)
            lengths = [heads.keys.shape[2]] * len(query)
        elif self.indexer:
            return None
        else:
            lengths, chosen = self._by_index(module, query, heads, mask, scale, native=native)
        if chosen is None:
            return None
        module.traffic = module.traffic + self._traffic(query, heads, chosen, lengths, by_index=indices is None)
        if native:
            assert self.decode is not None, "a call that the kernel serves has one"
            return self.decode.of_chosen(query, heads, chosen, scale=scale, sinks=sinks)
        return attend_chosen(query, heads, chosen, scale=scale, sinks=sinks)

    def _by_index(
        self, module: Any, query: Tensor, heads: Heads, mask: Tensor | None, scale: float, *, native: bool
    ) -> tuple[list[int], Chosen | None]:
        """Return the positions of each row, and those chosen by the index of the followed cache layer."""
        followed = _FOLLOWED.get()
        layer = None if followed is None else followed.layer
        if followed is None or layer is None or layer.keys is not heads.keys:
            return [], None
        rows, most = getattr(layer, "row_indices", None), heads.keys.shape[2]
        has_length = isinstance(rows, RowIndices) or is_followed(layer)
        # in a captured step the layer has its length on the GPU, and no index follows it
        length = length_of(layer) if most > self.sparsity.budget and has_length else most
        if length <= self.sparsity.budget:
            return [], None
        if isinstance(rows, RowIndices) and query.shape[2] == 1:
            lengths = row_lengths(mask, len(query), length)
            if lengths is not None:
                return lengths, self._by_row(rows, lengths, query, heads, scale, native=native)
        if not is_followed(layer):
            _tell(module, type(layer).__name__)
            return [], None
        more_keys = None if heads.more_keys is None else heads.more_keys[:, :, :length]
        keys = heads.keys[:, :, :length]
        heads = Heads(keys, keys if heads.values is heads.keys else heads.values[:, :, :length], more_keys)
        mask = None if mask is None else mask[..., :length]
        followed.index, chosen = self._select(followed.index, query, heads, mask, scale, native=native)
        return [length] * len(query), chosen

    def _by_row(
        self, rows: RowIndices, lengths: list[int], query: Tensor, heads: Heads, scale: float, *, native: bool
    ) -> Chosen:  # fmt: skip
        """Return the positions that each row of a running batch reads, chosen by the row's own index."""
        H, (K, columns) = query.shape[1], heads.keys.shape[1:3]
        parts = list[Chosen]()
        for at, length in enumerate(lengths):
            if length <= self.sparsity.budget:
                parts.append(every_position(length, K if self.sparsity.shared else H, query.device))
                continue
            own = query[at : at + 1], row_of(heads, at, length)
            rows.rows[at], chosen = self._select(rows.rows[at], *own, None, scale, native=native)
            parts.append(chosen)
        return joined(parts, [columns - length for length in lengths])

    def _select(
        self, index: KeyIndex | None, query: Tensor, heads: Heads, mask: Tensor | None, scale: float, *, native: bool
    ) -> tuple[KeyIndex, Chosen]:
        """Return the index with all keys of `heads`, made where it is missing, and what it chooses."""
        B, _, T, _ = query.shape
        K, length = heads.keys.shape[1:3]
        visible = visible_positions(mask, B, T, length, query.device)
        if index is None or index.format != self.sparsity.index:
            index = KeyIndex.of(heads, visible[:, -1], self.sparsity.index)
        if not native:
            index.extend(heads, length)
            scores = estimates(query, index.codes, index.format, length, scale)
            return index, choose(scores, K, visible, self.sparsity)
        assert self.decode is not None, "a call that the kernel serves has one"
        kernel = IndexKernel(self.decode.kernel, self.decode.threads)
        kernel.extend(index, heads, length)
        return index, kernel.select(index, query, mask, self.sparsity, scale)

    def _traffic(
        self, query: Tensor, heads: Heads, chosen: Chosen, lengths: list[int], *, by_index: bool
    ) -> Traffic:  # fmt: skip
        """Return the bytes that a call reads, counted from its tensors."""
        K = heads.keys.shape[1]
        parts = [heads.keys, *([] if heads.values is heads.keys else [heads.values])]
        parts += [] if heads.more_keys is None else [heads.more_keys]
        row_bytes = sum(each.shape[-1] * each.itemsize for each in parts)
        sizes = query.shape[1], K, row_bytes, query.shape[-1]
        index = sum(self.sparsity.traffic(length, *sizes).index for length in lengths) if by_index else 0
        gathered = int(chosen.counts.sum()) * row_bytes
        return Traffic(index, gathered, sum(lengths) * K * row_bytes, len(query) * query.shape[2])


def _of_indexer(indices: Tensor, heads: Heads, mask: Tensor | None) -> Chosen | None:
    """Return the visible positions that an indexer chose; None where it chose among no more than it takes."""
    B, T, most = indices.shape
    K, L = heads.keys.shape[1:3]
    if most >= L:
        return None
    visible = visible_positions(mask, B, T, L, indices.device)
    taken = visible.gather(-1, indices.long())
    positions = torch.where(taken, indices, L).sort(-1).values
    lists = positions.masked_fill(positions == L, 0).int()[:, :, None].expand(-1, -1, K, -1)
    return Chosen(lists.contiguous(), taken.sum(-1).int()[:, :, None].expand(-1, -1, K).contiguous())


@contextmanager
def following(cache: Any, number: int) -> Generator[None]:
    """While a stock module updates layer `number` of `cache` and attends to it, keep the index of that layer."""
    followed = _Followed(cache, number, None, 0)
    layer = followed.layer
    if layer is not None and is_followed(layer) and layer.is_initialized:
        followed.index, followed.before = index_of(layer), length_of(layer)
        keep_index(layer, None)  # after an error there is none
    token = _FOLLOWED.set(followed)
    try:
        yield
    finally:
        _FOLLOWED.reset(token)
    layer = followed.layer
    if layer is not None and followed.index is not None:
        keep_index(layer, followed.index)


def follows_cache(stock: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Return the members of a subclass of `stock` whose calls follow the cache that they are given."""
    forward = stock.forward
    place = list(inspect.signature(forward).parameters).index(_CACHE) - 1

    @functools.wraps(forward)
    def followed(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get(_CACHE, args[place] if place < len(args) else None)
        if cache is None:
            return forward(self, *args, **kwargs)
        with following(cache, self.layer_idx):
            return forward(self, *args, **kwargs)

    return {"forward": followed}


def _tell(module: Any, layer: str) -> None:
    """Log once per module and kind of cache that attention stays dense."""
    if module.told_of != layer:
        module.told_of = layer
        reason = "no index follows this cache (or `torch.inference_mode`, whose tensors have no versions)"
        log.warning("layer %s: attention over `%s` stays dense: %s", module.layer_idx, layer, reason)

"""`Reading`: prompts on their way into a cache, one in chunks or several side by side.

In: generations of one adapter, each with the part of its prompt that is cached already. Out: a `CachedRow` for each,
and the scores of its first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ktc.inference.serving.decoder import Decoder
from ktc.inference.serving.generation import Generation
from ktc.inference.serving.row_cache import CachedRow, cached_row, window_of
from ktc.model.attention.int8_tensor import Int8Tensor


class Reading:
    """Prompts as rows that are padded on the left, over cached beginnings that are padded on the left."""

    def __init__(
        self, decoder: Decoder, adapter: str, generations: Sequence[Generation], known: Sequence[CachedRow | None] = ()
    ) -> None:
        """Start reading. Several rows with cached beginnings need a cache without windows."""
        self.adapter, self.generations = adapter, list(generations)
        self._decoder, self._done = decoder, 0
        self._lengths = [len(each.tokens) for each in self.generations]
        self._known = list(known) or [None] * len(self.generations)
        beginnings = [0 if row is None else row.length for row in self._known]
        rests = [each.tokens[begun:] for each, begun in zip(self.generations, beginnings, strict=True)]
        self._before, self._width = max(beginnings), max(map(len, rests))
        before, width = self._before, self._width
        ids = torch.zeros((len(rests), width), dtype=torch.long)
        mask = torch.zeros((len(rests), before + width), dtype=torch.long)
        for at, (rest, begun) in enumerate(zip(rests, beginnings, strict=True)):
            ids[at, width - len(rest) :] = torch.tensor(rest)
            mask[at, before - begun : before] = 1
            mask[at, before + width - len(rest) :] = 1
        self._ids, self._mask = ids.to(decoder.device), mask.to(decoder.device)
        self._positions = (self._mask.cumsum(1) - 1).clamp(min=0)[:, before:]
        self._cache: Any = self.generations[0].cache
        self._scores: Tensor | None = None
        if before:
            self._begin(before)

    @property
    def left(self) -> int:
        """The tokens that are still to be read, padding included."""
        return (self._width - self._done) * len(self.generations)

    def advance(self, most: int) -> int:
        """Read the next columns, about `most` tokens; return how many."""
        rows = len(self.generations)
        end = min(self._width, self._done + max(most // rows, 1))
        mask = self._mask[:, : self._before + end]
        self._scores = self._decoder.scores(
            self._ids[:, self._done : end], self._cache, None if bool(mask.all()) else mask,
            self._positions[:, self._done : end],
        )  # fmt: skip
        read, self._done = (end - self._done) * rows, end
        return read

    @property
    def scores(self) -> Tensor | None:
        """The scores of every row's first token, (rows, V), when all is read."""
        return self._scores if self._done == self._width else None

    @property
    def cache(self) -> Any:
        """The cache of transformers that holds the only row."""
        return self._cache

    def beginning(self, at: int) -> CachedRow | None:
        """Return the beginning of a prompt that was cached already."""
        return self._known[at]

    def row(self, at: int) -> CachedRow:
        """Return one prompt in the cache, as views where its tokens are not apart."""
        known, length = self._known[at], self._lengths[at]
        apart = known is not None and length - known.length < self._width
        kept = self._mask[at].nonzero()[:, 0] if apart else None
        return cached_row(self._cache, at, kept, length)

    def _begin(self, width: int) -> None:
        """Put the cached beginnings in the cache, aligned at their last token."""
        windows = next(row.windows for row in self._known if row is not None)
        for index, window in enumerate(windows):
            parts = [None if row is None else row.layer(index) for row in self._known]
            like = next((part for part in parts if part is not None), None)
            if like is None:
                continue
            columns = max(part.keys.shape[1] for part in parts if part is not None)
            keys, values = (
                _aligned([None if part is None else part[side] for part in parts], like[side], columns)
                for side in (0, 1)
            )
            layer = self._cache.layers[index]
            layer.update(keys, values)
            if window is not None and window_of(layer) is not None:
                layer.cumulative_length = width


def _aligned(parts: Sequence[Tensor | None], like: Tensor, columns: int) -> Tensor:
    """Stack (heads, length, width) to (rows, heads, columns, width), zeros on the left; codes stay codes."""
    if isinstance(like, Int8Tensor):
        held = [cast("Int8Tensor | None", part) for part in parts]
        codes = _aligned([None if part is None else part.codes for part in held], like.codes, columns)
        scales = _aligned([None if part is None else part.scales for part in held], like.scales, columns)
        return Int8Tensor(codes, scales, like.dtype)
    heads, _, size = like.shape
    out = like.new_zeros((len(parts), heads, columns, size))
    for at, part in enumerate(parts):
        if part is not None:
            out[at, :, columns - part.shape[1] :] = part
    return out

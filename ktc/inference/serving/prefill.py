"""`PrefillBatch`: prompts on their way into a cache, one in chunks or several side by side.

In: generations of one adapter, each with the part of its prompt that is cached already. Out: a `CachedRow` for each,
and the logits of its first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ktc.inference.serving.generation import Generation
from ktc.inference.serving.model_runner import ModelRunner
from ktc.inference.serving.row_cache import CachedRow, cached_row, window_of
from ktc.model.attention.int8_tensor import Int8Tensor


class PrefillBatch:
    """Prompts as rows that are padded on the left, over cached beginnings that are padded on the left."""

    def __init__(
        self, runner: ModelRunner, generations: Sequence[Generation], beginnings: Sequence[CachedRow | None] = ()
    ) -> None:
        """Begin; `beginnings` are cached. Several rows with cached beginnings need a cache without windows."""
        self.generations = list(generations)
        self.beginnings = list(beginnings) or [None] * len(self.generations)
        self._runner, self._done = runner, 0
        lengths = [0 if row is None else row.length for row in self.beginnings]
        rests = [generation.tokens[length:] for generation, length in zip(self.generations, lengths, strict=True)]
        before, width = self._before, self._width = max(lengths), max(map(len, rests))
        ids = torch.zeros((len(rests), width), dtype=torch.long)
        mask = torch.zeros((len(rests), before + width), dtype=torch.long)
        for at, (rest, length) in enumerate(zip(rests, lengths, strict=True)):
            ids[at, width - len(rest) :] = torch.tensor(rest)
            mask[at, before - length : before] = 1
            mask[at, before + width - len(rest) :] = 1
        self._ids, self._mask = ids.to(runner.device), mask.to(runner.device)
        self._positions = (self._mask.cumsum(1) - 1).clamp(min=0)[:, before:]
        self.cache: Any = self.generations[0].cache
        """The cache of transformers that all rows are in."""
        if before:
            self._store_beginnings()

    @property
    def adapter(self) -> str:
        """The adapter of all prompts."""
        return self.generations[0].request.adapter

    def advance(self, stop: int | None = None) -> Tensor | None:
        """Compute the columns before `stop`; return the logits of every row's first token, (rows, V), after the last.

        Return None before. Without `stop` compute all.
        """
        if (passes := self.generations[0].passes) is not None:
            assert len(self.generations) == 1 and self.beginnings == [None], "such a prompt is read alone, in one pass"
            self._done = self._width
            return passes.logits(self.generations[0].tokens)
        columns = slice(self._done, self._width if stop is None else min(stop, self._width))
        mask = self._mask[:, : self._before + columns.stop]
        logits = self._runner.logits(
            self._ids[:, columns], self.cache, None if bool(mask.all()) else mask, self._positions[:, columns]
        )
        self._done = columns.stop
        return logits if self._done == self._width else None

    def row(self, at: int) -> CachedRow:
        """Return one prompt in the cache, as views where its tokens are not apart."""
        beginning, length = self.beginnings[at], int(self._mask[at].sum())
        apart = beginning is not None and length - beginning.length < self._width
        kept = self._mask[at].nonzero()[:, 0] if apart else None
        return cached_row(self.cache, at, kept, length)

    def _store_beginnings(self) -> None:
        """Put the cached beginnings in the cache, aligned at their last token."""
        windows = next(row.windows for row in self.beginnings if row is not None)
        for index, window in enumerate(windows):
            parts = [None if row is None else row.layer(index) for row in self.beginnings]
            like = next((part for part in parts if part is not None), None)
            if like is None:
                continue
            columns = max(part.keys.shape[1] for part in parts if part is not None)
            keys, values = (
                _aligned([None if part is None else part[side] for part in parts], like[side], columns)
                for side in (0, 1)
            )
            layer = self.cache.layers[index]
            layer.update(keys, values)
            if window is not None and window_of(layer) is not None:
                layer.cumulative_length = self._before


def _aligned(parts: Sequence[Tensor | None], like: Tensor, columns: int) -> Tensor:
    """Stack (heads, length, width) to (rows, heads, columns, width), zeros on the left; codes stay codes."""
    if isinstance(like, Int8Tensor):
        coded = [cast("Int8Tensor | None", part) for part in parts]
        codes = _aligned([None if part is None else part.codes for part in coded], like.codes, columns)
        scales = _aligned([None if part is None else part.scales for part in coded], like.scales, columns)
        return Int8Tensor(codes, scales, like.dtype)
    heads, _, size = like.shape
    out = like.new_zeros((len(parts), heads, columns, size))
    for at, part in enumerate(parts):
        if part is not None:
            out[at, :, columns - part.shape[1] :] = part
    return out

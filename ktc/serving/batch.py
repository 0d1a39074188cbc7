"""The running batch of one adapter: sequences that take one step of decoding together.

In: generations whose prompts are read. Out: the scores of every sequence's next token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ktc.serving.decoder import Decoder
from ktc.serving.generation import Generation
from ktc.serving.native_rows import MOST_ROWS
from ktc.serving.row_cache import CachedRow, RowCache


class RowBatch:
    """Sequences in one cache, aligned at their last token. An empty one can be used again."""

    def __init__(self, decoder: Decoder) -> None:
        self.running: list[Generation] = []
        self._decoder, self._native = decoder, decoder.native_rows()
        self._rows = RowCache(steady=0 if self._native is None else MOST_ROWS)

    @property
    def is_steady(self) -> bool:
        """Whether native steps know its memory, so that an empty batch is worth keeping."""
        return self._native is not None

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def join(self, generation: Generation, row: CachedRow) -> None:
        """Add a sequence, whose cache lacks its last token."""
        self._rows.join(row)
        self.running.append(generation)

    def leave(self, at: int) -> None:
        """Remove a sequence; the last one takes its place."""
        self._rows.leave(at)
        self.running[at] = self.running[-1]
        self.running.pop()

    def row(self, at: int) -> CachedRow:
        """Return a copy of a sequence's keys and values."""
        return self._rows.row(at)

    def step(self) -> Tensor:
        """Read the last token of every sequence; return the scores of the next, (rows, V)."""
        device = self._decoder.device
        ids = torch.tensor([[each.tokens[-1]] for each in self.running], device=device)
        if self._native is not None and (found := self._native.scores(self._rows, ids)) is not None:
            return found
        lengths = torch.tensor(self._rows.lengths, device=device)[:, None]
        columns = self._rows.columns
        mask: Tensor | None = None
        if min(self._rows.lengths) < columns:
            mask = (torch.arange(columns + 1, device=device) >= columns - lengths).long()
        scores = self._decoder.scores(ids, self._rows.cache, mask, lengths)
        self._rows.appended()
        return scores


class LoneBatch:
    """Sequences that each have a cache of their own, and take their steps one after the other."""

    nbytes = 0

    def __init__(self, decoder: Decoder) -> None:
        self.running: list[Generation] = []
        self._decoder, self._caches = decoder, list[Any]()

    def join(self, generation: Generation, cache: Any) -> None:
        """Add a sequence with its cache, which lacks its last token."""
        self.running.append(generation)
        self._caches.append(cache)

    def leave(self, at: int) -> None:
        """Remove a sequence; the last one takes its place."""
        for each in (self.running, self._caches):
            each[at] = each[-1]
            each.pop()

    def step(self) -> Tensor:
        """Read the last token of every sequence; return the scores of the next, (rows, V)."""
        scores = [
            self._decoder.scores(self._ids(each), cache, None, None)
            for each, cache in zip(self.running, self._caches, strict=True)
        ]
        return torch.cat(scores)

    def _ids(self, generation: Generation) -> Tensor:
        return torch.tensor([generation.tokens[-1:]], device=self._decoder.device)

"""The running batch of one adapter: sequences that take one step of decoding together.

In: generations whose prompts are read. Out: the scores of every sequence's next token.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from ktc.foundation.memory_faults import memory_fault
from ktc.inference.serving.decoder import Decoder
from ktc.inference.serving.generation import Generation
from ktc.inference.serving.pages import PagePool
from ktc.inference.serving.row_cache import CachedRow, RowCache

log = logging.getLogger(__name__)


class RowBatch:
    """Sequences in one cache, aligned at their last token. An empty one can be used again."""

    def __init__(self, decoder: Decoder) -> None:
        self.running: list[Generation] = []
        self._decoder, self._native = decoder, decoder.native_rows()
        self._rows = RowCache(decoder.paged)

    @property
    def nbytes(self) -> int:
        """The memory of the running sequences."""
        return self._rows.nbytes

    @property
    def pool(self) -> PagePool | None:
        """The pages of running sequences and of those that are kept, which make an empty batch worth keeping."""
        return self._rows.pool

    def compact(self) -> None:
        """Release memory that no page needs. Where memory is missing for that, the rows stay as they are."""
        if self._native is not None:
            self._native.forget()
        try:
            self._rows.compact()
        except (MemoryError, RuntimeError) as error:
            if memory_fault(error) is None:
                raise
            log.warning("memory was missing to make a cache smaller: %s", error)

    def hold(self, row: CachedRow, beginning: CachedRow | None) -> CachedRow:
        """Return a row to be kept, and to join once: see `RowCache.hold`."""
        return self._rows.hold(row, beginning)

    def join(self, generation: Generation, row: CachedRow) -> None:
        """Add a sequence, whose cache lacks its last token."""
        self._rows.join(row)
        self.running.append(generation)

    def leave(self, at: int) -> None:
        """Remove a sequence; the last one takes its place."""
        self._rows.leave(at)
        self.running[at] = self.running[-1]
        self.running.pop()

    def clear(self) -> list[Generation]:
        """Remove all sequences, as after a failed step, and return them."""
        self._rows.clear()
        running, self.running = self.running, []
        return running

    def row(self, at: int) -> CachedRow:
        """Return a sequence's keys and values, for later requests."""
        return self._rows.row(at)

    def step(self) -> Tensor:
        """Read the last token of every sequence; return the scores of the next, (rows, V)."""
        device = self._decoder.device
        ids = torch.tensor([[each.tokens[-1]] for each in self.running], device=device)
        self._rows.begin_step()
        found = None if self._native is None else self._native.scores(self._rows, ids)
        scores = self._eager(ids) if found is None else found
        self._rows.appended()
        return scores

    def _eager(self, ids: Tensor) -> Tensor:
        device = self._decoder.device
        lengths = torch.tensor(self._rows.lengths, device=device)[:, None]
        columns = self._rows.columns
        mask: Tensor | None = None
        if min(self._rows.lengths) < columns:
            mask = (torch.arange(columns + 1, device=device) >= columns - lengths).long()
        return self._decoder.scores(ids, self._rows.cache, mask, lengths)


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

    def clear(self) -> list[Generation]:
        """Remove all sequences, and return them."""
        self._caches.clear()
        running, self.running = self.running, []
        return running

    def step(self) -> Tensor:
        """Read the last token of every sequence; return the scores of the next, (rows, V)."""
        scores = [
            self._decoder.scores(self._ids(each), cache, None, None)
            for each, cache in zip(self.running, self._caches, strict=True)
        ]
        return torch.cat(scores)

    def _ids(self, generation: Generation) -> Tensor:
        return torch.tensor([generation.tokens[-1:]], device=self._decoder.device)

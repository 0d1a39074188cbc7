"""The running batch of one adapter: sequences that take one step of decoding together.

In: generations whose prompts are prefilled. Out: the logits of every sequence's next token, (rows, V) in fp32.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import torch
from torch import Tensor

from ktc.foundation.memory_faults import memory_fault
from ktc.inference.serving.generation import Generation
from ktc.inference.serving.model_runner import ModelRunner
from ktc.inference.serving.pages import PagePool
from ktc.inference.serving.row_cache import CachedRow, RowCache

log = logging.getLogger(__name__)


class RowBatch:
    """Sequences in one cache, aligned at their last token. An empty one can be used again."""

    def __init__(self, runner: ModelRunner) -> None:
        self.running: list[Generation] = []
        self._runner, self._native = runner, runner.native_rows()
        self._rows = RowCache(runner.paged)

    @property
    def nbytes(self) -> int:
        """The memory of the running sequences."""
        return self._rows.nbytes

    @property
    def pool(self) -> PagePool | None:
        """The pages of running sequences and of the prefix cache, which make an empty batch worth keeping."""
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
        """Return a row for the prefix cache, which may join once: see `RowCache.hold`."""
        return self._rows.hold(row, beginning)

    def join(self, generation: Generation, row: CachedRow) -> None:
        """Add a sequence, whose cache lacks its last token."""
        self._rows.join(row)
        self.running.append(generation)

    def leave(self, at: int) -> None:
        """Remove a sequence; the last one takes its place."""
        self._rows.leave(at)
        _swap_out(self.running, at)

    def clear(self) -> list[Generation]:
        """Remove all sequences, as after a failed step, and return them."""
        self._rows.clear()
        running, self.running = self.running, []
        return running

    def row(self, at: int) -> CachedRow:
        """Return a sequence's keys and values, for later requests."""
        return self._rows.row(at)

    def step(self) -> Tensor:
        """Read the last token of every sequence; return the logits of the next."""
        ids = torch.tensor([[generation.tokens[-1]] for generation in self.running], device=self._runner.device)
        self._rows.begin_step()
        native = None if self._native is None else self._native.logits(self._rows, ids)
        logits = self._eager(ids) if native is None else native
        self._rows.appended()
        return logits

    def _eager(self, ids: Tensor) -> Tensor:
        device = self._runner.device
        lengths = torch.tensor(self._rows.lengths, device=device)[:, None]
        columns = self._rows.columns
        mask: Tensor | None = None
        if min(self._rows.lengths) < columns:
            mask = (torch.arange(columns + 1, device=device) >= columns - lengths).long()
        return self._runner.logits(ids, self._rows.cache, mask, lengths)


class UnbatchedSequences:
    """Sequences that each have a cache of their own, and take their steps one after the other."""

    nbytes: Final = 0
    pool: Final = None

    def __init__(self, runner: ModelRunner) -> None:
        self.running: list[Generation] = []
        self._runner, self._caches = runner, list[Any]()

    def compact(self) -> None:
        """Do nothing: no memory is shared."""

    def join(self, generation: Generation, cache: Any) -> None:
        """Add a sequence with its cache, which lacks its last token."""
        self.running.append(generation)
        self._caches.append(cache)

    def leave(self, at: int) -> None:
        """Remove a sequence; the last one takes its place."""
        _swap_out(self.running, at)
        _swap_out(self._caches, at)

    def clear(self) -> list[Generation]:
        """Remove all sequences, and return them."""
        self._caches.clear()
        running, self.running = self.running, []
        return running

    def step(self) -> Tensor:
        """Read the last token of every sequence; return the logits of the next."""
        return torch.cat([self._logits(*both) for both in zip(self.running, self._caches, strict=True)])

    def _logits(self, generation: Generation, cache: Any) -> Tensor:
        if generation.passes is not None:
            return generation.passes.logits(generation.tokens)
        last = torch.tensor([generation.tokens[-1:]], device=self._runner.device)
        return self._runner.logits(last, cache, None, None)


def _swap_out(rows: list[Any], at: int) -> None:
    rows[at] = rows[-1]
    rows.pop()

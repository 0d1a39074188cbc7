"""The running batch of one adapter: sequences that take one step of decoding together.

In: generations whose prompts are prefilled. Out: the logits of every sequence's next token, (rows, V) in fp32. Where
steps are CUDA graphs, they are there when `finish` returns; meanwhile the caller may enqueue what reads them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from ktc.foundation.memory_faults import memory_fault
from ktc.inference.serving.generation import Generation
from ktc.inference.serving.model_runner import ModelRunner
from ktc.inference.serving.pages import PagePool
from ktc.inference.serving.row_cache import CachedRow, RowCache
from ktc.inference.serving.row_memory import STANDING, RowMemory, unfit_row

log = logging.getLogger(__name__)


class RowBatch:
    """Sequences in one cache, aligned at their last token. An empty one can be used again."""

    def __init__(self, runner: ModelRunner, most: int = 1, standing: int = STANDING) -> None:
        """Make an empty one; at most `most` sequences will run at once. `standing` is as of `RowMemory`."""
        self.running: list[Generation] = []
        self._runner, self._native, self._graphs = runner, runner.native_rows(), runner.graph_rows()
        self._rows = RowCache(runner.paged)
        if self._graphs is not None:
            self._rows = RowMemory(most, standing, self._graphs.indexed)
        self._is_kept = self._graphs is not None
        self._wait: Callable[[], None] | None = None

    @property
    def nbytes(self) -> int:
        """The memory of the running sequences."""
        return self._rows.nbytes

    @property
    def pool(self) -> PagePool | None:
        """The pages of running sequences and of the prefix cache, which make an empty batch worth keeping."""
        return self._rows.pool

    @property
    def is_kept(self) -> bool:
        """Whether an empty one is worth keeping without pages: it has graphs, or knows that it can have none."""
        return self._is_kept

    @property
    def may_step_within_a_prompt(self) -> bool:
        """Whether the next step is a replay, which runs no code of the model."""
        rows = self._rows
        return bool(self.running) and isinstance(rows, RowMemory) and self._graphs is not None and (
            self._graphs.is_ready(rows)
        )  # fmt: skip

    def compact(self) -> None:
        """Release memory that no page needs. Where memory is missing for that, the rows stay as they are."""
        for recorded in (self._native, self._graphs):
            if recorded is not None:
                recorded.forget()
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
        if self._graphs is not None and (reason := unfit_row(row)):
            self._graphs.refuse(reason)
            self._leave_memory()
        self._rows.join(row)
        self.running.append(generation)

    def leave(self, at: int) -> None:
        """Remove a sequence; the last one takes its place."""
        self._rows.leave(at)
        _swap_out(self.running, at)

    def clear(self) -> list[Generation]:
        """Remove all sequences, as after a failed step, and return them. A replay that was begun is waited for."""
        try:
            self.finish()  # a GPU still calls functions of the step, whose memory may be released now
        except Exception as error:  # noqa: BLE001 - the step has failed already
            log.warning("a step that had failed ended with %s: %s", type(error).__name__, error)
        self._rows.clear()
        running, self.running = self.running, []
        return running

    def row(self, at: int) -> CachedRow:
        """Return a sequence's keys and values, for later requests."""
        return self._rows.row(at)

    def step(self) -> Tensor:
        """Read the last token of every sequence; return the logits of the next, which are there after `finish`."""
        last = [generation.tokens[-1] for generation in self.running]
        logits = self._replayed(last)
        if logits is None:
            assert isinstance(self._rows, RowCache)
            ids = torch.tensor(last, device=self._runner.device)[:, None]
            self._rows.begin_step()
            native = None if self._native is None else self._native.logits(self._rows, ids)
            logits = self._eager(self._rows, ids) if native is None else native
        self._rows.appended()
        return logits

    def finish(self) -> None:
        """Wait for the step, asleep. Raises what its kernels have raised on the CPU or on a GPU.

        After an interrupt the step is still under way: the next call, such as that of `clear`, waits again.
        """
        if self._wait is None:
            return
        try:
            self._wait()
        except Exception:
            self._wait = None
            raise
        self._wait = None

    @property
    def lacks_steps(self) -> bool:
        """Whether the memory of an empty one has a number of slots whose step is not captured."""
        rows, graphs = self._rows, self._graphs
        return not self.running and graphs is not None and isinstance(rows, RowMemory) and bool(graphs.missing(rows))

    def capture(self, row: CachedRow) -> bool:
        """Capture the step of one number of slots for rows such as this one; return whether one was captured.

        Where memory is missing it raises; steps of these slots and more are not captured while the rows' memory stays.
        """
        if self._graphs is None or self.running or unfit_row(row):
            return False
        assert isinstance(self._rows, RowMemory)
        slots = 1
        try:
            self._rows.join(row)
            slots = self._graphs.missing(self._rows)
            begun = self._graphs.begin(self._rows, [0], slots, True) if slots else None
            if begun is not None:
                begun[1]()
            return begun is not None
        except Exception as error:
            if memory_fault(error) is not None:
                self._graphs.lacked(self._rows, slots)
            raise
        finally:
            self._rows.clear()

    def _replayed(self, last: list[int]) -> Tensor | None:
        """Begin a captured step; without graphs return None."""
        if not isinstance(self._rows, RowMemory) or self._graphs is None:
            return None
        begun = self._graphs.begin(self._rows, last)
        if begun is None:
            self._leave_memory()
            return None
        logits, self._wait = begun
        return logits

    def _leave_memory(self) -> None:
        """Move the rows to a cache for eager steps, which this batch takes from now on."""
        rows = RowCache(self._runner.paged)
        for at in range(len(self._rows.lengths)):
            rows.join(self._rows.row(at))
        self._rows, self._graphs = rows, None

    def _eager(self, rows: RowCache, ids: Tensor) -> Tensor:
        device = self._runner.device
        lengths = torch.tensor(rows.lengths, device=device)[:, None]
        columns = rows.columns
        mask: Tensor | None = None
        if min(rows.lengths) < columns:
            mask = (torch.arange(columns + 1, device=device) >= columns - lengths).long()
        return self._runner.logits(ids, rows.cache, mask, lengths)


class UnbatchedSequences:
    """Sequences that each have a cache of their own, and take their steps one after the other."""

    nbytes: Final = 0
    pool: Final = None
    is_kept: Final = False
    may_step_within_a_prompt: Final = False

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

    def finish(self) -> None:
        """Do nothing: a step is done when it returns."""

    def _logits(self, generation: Generation, cache: Any) -> Tensor:
        if generation.passes is not None:
            return generation.passes.logits(generation.tokens)
        last = torch.tensor([generation.tokens[-1:]], device=self._runner.device)
        return self._runner.logits(last, cache, None, None)


def _swap_out(rows: list[Any], at: int) -> None:
    rows[at] = rows[-1]
    rows.pop()

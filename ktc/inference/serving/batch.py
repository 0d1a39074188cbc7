"""The running batch of one adapter: sequences that take one step of decoding together.

In: generations whose prompts are prefilled. Out: the logits of every sequence's next token, (rows, V) in fp32. Where
steps are CUDA graphs, they are there when `finish` returns; meanwhile the caller may enqueue what reads them, and begin
the next step with tokens that are on the device alone. Rows may leave while one is under way: its logits are of those
that it had begun with. `row` leaves out its position, which a row that has ended does not need.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ktc.foundation.memory_faults import memory_fault
from ktc.inference.serving.generation import Generation
from ktc.inference.serving.model_runner import ModelRunner
from ktc.inference.serving.pages import PagePool
from ktc.inference.serving.row_cache import CachedRow, RowCache
from ktc.inference.serving.row_memory import STANDING, RowMemory, unfit_row
from ktc.model.decode_steps.device_feed import sent
from ktc.model.decode_steps.step_ahead import PendingStep

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BegunStep:
    """A step of `rows`; its logits (rows, V) are there when it is done."""

    rows: tuple[Generation, ...]
    logits: Tensor


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
        self._begun_rows: tuple[Generation, ...] = ()  # of the last step
        self._under_way = deque[PendingStep]()  # the earliest one first
        self._ahead: BegunStep | Exception | None = None  # the last of them, or why it did not begin

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
        assert self._ahead is None, "a step under way reads what is forgotten"
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
        assert self._ahead is None, "its tokens are read before"
        if self._graphs is not None and (reason := unfit_row(row)):
            self._graphs.refuse(reason)
            self._leave_memory()
        self._rows.join(row)
        self.running.append(generation)

    def leave(self, at: int) -> None:
        """Remove a sequence; the last one takes its place."""
        self._rows.leave(at)
        _swap_out(self.running, at)
        if not self.running:
            self._settle()

    def clear(self) -> list[Generation]:
        """Remove all sequences, as after a failed step, and return them. A replay that was begun is waited for."""
        self._settle()
        self._rows.clear()
        running, self.running = self.running, []
        return running

    def row(self, at: int) -> CachedRow:
        """Return a sequence's keys and values, for later requests; its last token has none."""
        if isinstance(self._rows, RowMemory):
            return self._rows.row(at, len(self.running[at].tokens) - 1)
        return self._rows.row(at)

    def step(self) -> BegunStep:
        """Return the step that was begun ahead; otherwise begin one, which reads the last token of every sequence.

        Rows that have left since are not in it. Raises why a step could not begin.
        """
        ahead, self._ahead = self._ahead, None
        if isinstance(ahead, Exception):
            raise ahead
        if ahead is None:
            self._begun_rows = tuple(self.running)
            return BegunStep(self._begun_rows, self._begun())
        running = set(self.running)
        left = [at for at, generation in enumerate(ahead.rows) if generation in running]
        if len(left) == len(ahead.rows):
            return ahead
        places = sent(torch.tensor(left, device="cpu"), ahead.logits.device)
        return BegunStep(tuple(ahead.rows[at] for at in left), ahead.logits.index_select(0, places))

    @property
    def is_ahead(self) -> bool:
        """Whether a step was begun ahead."""
        return self._ahead is not None

    @property
    def may_step_ahead(self) -> bool:
        """Whether the next step can begin before the host has the tokens of the last one.

        It is a replay for the same rows, of which none is known to end. Where a token ends one, the step computes a
        position too much.
        """
        rows = self._rows
        if self._graphs is None or not isinstance(rows, RowMemory) or not self._graphs.goes_ahead:
            return False
        if self._begun_rows != tuple(self.running) or any(generation.is_at_limit for generation in self.running):
            return False
        return rows.has_column and self._graphs.is_ready(rows)

    def step_ahead(self, tokens: Tensor) -> None:
        """Begin the next step with tokens (rows,) that the device chooses, behind the last step.

        Why it cannot begin is raised by `step`: the tokens come first.
        """
        assert self._graphs is not None and isinstance(self._rows, RowMemory)
        try:
            logits, wait = self._graphs.again(self._rows, tokens.clamp_min(0))  # a row with -1 ends
            self._under_way.append(PendingStep(wait))
            self._rows.appended()
            self._ahead = BegunStep(tuple(self.running), logits)
        except Exception as error:  # noqa: BLE001 - raised by `step`
            self._ahead = error

    def _begun(self) -> Tensor:
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
        """Wait for the earliest step, asleep. Raises what its kernels have raised on the CPU or on a GPU.

        After an interrupt the step is still under way: the next call, such as that of `clear`, waits again.
        """
        if not self._under_way:
            return
        try:
            self._under_way[0].finish()
        except Exception:
            self._under_way.popleft()
            raise
        self._under_way.popleft()

    def _settle(self) -> None:
        """Wait for all steps, which no sequence needs: a GPU calls functions of theirs, whose memory is released."""
        self._ahead, self._begun_rows = None, ()
        while self._under_way:
            try:
                self.finish()
            except Exception as error:  # noqa: BLE001 - its sequences have ended, or fail already
                log.warning("a step that no answer needs ended with %s: %s", type(error).__name__, error)

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
        logits, wait = begun
        self._under_way.append(PendingStep(wait))
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
    is_ahead: Final = False

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

    def step(self) -> BegunStep:
        """Read the last token of every sequence; return the logits of the next."""
        logits = [self._logits(*both) for both in zip(self.running, self._caches, strict=True)]
        return BegunStep(tuple(self.running), torch.cat(logits))

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

"""`Worker`: carries out the scheduler's decisions with the model. All calls are on one thread.

In: decisions. Out: `Event`s with tokens and ends, and reports to the scheduler. A fault in a pass ends its requests.
A fault in the choice of a token ends its request alone. Missing memory preempts the requests of the pass.
Passes leave cuDNN's attention out, which builds a plan for each length of a prompt.
Where steps are CUDA graphs, the pass of a prompt gives way between two layers: a batch whose last step is old takes one
there, so no answer waits for the whole pass. Events of such steps are emitted when the next step has begun, so that
their receivers work while the GPU does.
The next step of a batch begins before the host has the tokens of the last one, which the device reads itself
(`RowBatch.step_ahead`). They are read before anything else happens to the batch than a row that leaves it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Final

from ktc.foundation.memory_faults import memory_fault
from ktc.inference.serving.answer_grammar import SchemaTooComplex
from ktc.inference.serving.batch import BegunStep, RowBatch, UnbatchedSequences
from ktc.inference.serving.generation import Choice, Generation, choose_tokens
from ktc.inference.serving.model_runner import ModelRunner
from ktc.inference.serving.models import LoadedAdapters
from ktc.inference.serving.prefill import PrefillBatch
from ktc.inference.serving.prefix_cache import PrefixCache
from ktc.inference.serving.request import End, Event, Limits, Request
from ktc.inference.serving.row_cache import CachedRow
from ktc.inference.serving.row_memory import standing_bytes
from ktc.inference.serving.scheduler import DecodeStep, PrefillChunk, Scheduler, SchedulerOutput
from ktc.inference.serving.warm_prompts import read_warm_prompts
from ktc.model.attention.torch_plans import without_plans

log = logging.getLogger(__name__)
_MAX_IDLE_BYTES: Final = 1 << 30  # pages of empty batches that no sequence uses, or the memory of two where it is more
_OLD_STEP: Final = 0.1  # seconds after which a prompt gives way to running sequences

Emit = Callable[[Sequence[Event]], None]


class Worker:
    """The batches, prefills and cached prompts of a model, and the scheduler that decides about them."""

    def __init__(self, runner: ModelRunner, limits: Limits, emit: Emit, adapters: LoadedAdapters | None = None) -> None:
        self._runner, self._emit, self._adapters = runner, emit, adapters or LoadedAdapters(runner.model)
        self.prefixes = PrefixCache(0 if runner.unbatched_reason else limits.prefix_bytes)
        size = None if runner.unbatched_reason else runner.size
        self.scheduler = Scheduler(limits, size, self._num_cached)
        self._caches_prefixes = bool(limits.prefix_bytes)
        self._standing = standing_bytes(limits.cache_bytes)
        self._most_idle_bytes = max(_MAX_IDLE_BYTES, 2 * self._standing)
        self._preempted: dict[str, Generation] = {}
        self._prefills: dict[str, PrefillBatch] = {}  # begun ones, by the names of their first requests
        self.batches: dict[str, RowBatch | UnbatchedSequences] = {}  # by adapter; empty ones have pages
        self.num_cached_tokens = 0  # of prompts, which were not computed again
        self._unsent = list[Event]()
        self._stepped = dict[str, float]()  # when the last step of each adapter ended
        self._gives_way = False  # within such a step
        self._asked = 0.0  # when the pass of a prompt last had a chance to give way
        self._chunk = limits.prefill_chunk
        self._first: str | None = None  # the adapter whose steps were captured before the first request

    def _num_cached(self, request: Request, tokens: Sequence[int]) -> int:
        """Return how many first tokens of a request are in the prefix cache, of all of its tokens so far."""
        if not request.may_be_cached:
            return 0
        return self.prefixes.length(request.adapter, request.key(tokens), request.least_cached)

    def execute(self, decision: SchedulerOutput) -> None:
        """Carry out a decision, and report to the scheduler what became of its requests."""
        with without_plans():
            match decision:
                case PrefillChunk():
                    self._prefill(decision)
                case DecodeStep():
                    self._decode(decision.adapter)

    def drain(self) -> None:
        """Read the tokens of steps that were begun ahead, and emit all events, before other work than steps."""
        for adapter, batch in tuple(self.batches.items()):
            if batch.is_ahead:
                self._step(adapter)
        self.flush()

    def flush(self) -> None:
        """Emit the events that wait for the next step to begin."""
        events, self._unsent = self._unsent, []
        if events:
            self._emit(events)

    def capture(self, adapter: str) -> None:
        """Capture the steps of a batch before its first request, where steps are CUDA graphs, and read warm prompts."""
        if self._runner.example is None or self._runner.graph_rows() is None:
            return
        self._first = adapter
        self._capture_all(adapter)
        try:
            self._adapters.use(adapter)
            with without_plans():
                read_warm_prompts(self._runner, adapter, self._chunk)
        except Exception as error:  # noqa: BLE001 - requests do without
            log.warning("prompts before the first request could not be read: %s", _words(error))

    def _capture_all(self, adapter: str) -> None:
        batch = self.batches[adapter] = RowBatch(self._runner, self.scheduler.most_running, self._standing)
        while self._captured(adapter, batch):
            pass

    @property
    def lacks_steps(self) -> bool:
        """Whether a batch that no request uses has steps to capture: its memory was outgrown, or is new."""
        return any(isinstance(batch, RowBatch) and batch.lacks_steps for batch in self.batches.values())

    def capture_one(self) -> None:
        """Capture a step of a batch that no request uses, for requests to come."""
        for adapter, batch in self.batches.items():
            if isinstance(batch, RowBatch) and batch.lacks_steps:
                self._captured(adapter, batch)
                return

    def renew(self) -> None:
        """Forget as for a change of weights, and capture again what was captured before the first request."""
        self.forget()
        if self._first is not None and self._first not in self.batches:
            self._capture_all(self._first)

    def _captured(self, adapter: str, batch: RowBatch) -> bool:
        """Capture the step of one number of slots; return whether one was captured.

        Without memory the steps of fewer slots stay; after another error the batch is dropped.
        """
        assert self._runner.example is not None
        try:
            self._adapters.use(adapter)
            with without_plans():
                return batch.capture(self._runner.example)
        except Exception as error:
            if is_out_of_memory(error):
                log.warning("memory was missing to capture steps of many sequences: %s", _words(error))
            else:
                log.warning("the step of a batch could not be captured, and its memory is released", exc_info=True)
                del self.batches[adapter]
            return False

    def end(self, ends: Mapping[str, End]) -> None:
        """End requests without a token, wherever they are. Those that have ended before are ignored."""
        events = [Event(name, (), end) for name, end in ends.items() if self.scheduler.is_live(name)]
        for adapter, batch in tuple(self.batches.items()):
            leaving = [at for at, generation in enumerate(batch.running) if generation.request.name in ends]
            for at in reversed(leaving):
                batch.leave(at)
            if leaving:
                self._settle(adapter)
        self._finish(events)

    def abort(self, end: End) -> None:
        """End all requests, in any state that a fault has left."""
        self._prefills.clear()
        for batch in self.batches.values():
            batch.clear()  # waits for a step that a GPU still computes with the memory of its batch
        self.batches.clear()
        self._finish([Event(request.name, (), end) for request in self.scheduler.live])

    def forget(self) -> None:
        """Drop cached prompts, pages of empty batches and native steps, as for a change of weights."""
        self.prefixes.clear()
        for adapter, batch in tuple(self.batches.items()):
            if batch.running:
                batch.compact()
            else:
                del self.batches[adapter]

    def remove_adapter(self, adapter: str) -> None:
        """Remove an adapter that no request uses, and its cached prompts."""
        self.drain()
        self.prefixes.clear(adapter)
        self.batches.pop(adapter, None)
        try:
            self._adapters.remove(adapter)
        except Exception:
            log.exception("an adapter could not be removed; its memory stays in use")

    # Prompts -----------------------------------------------------------------------------------------------------
    def _prefill(self, chunk: PrefillChunk) -> None:
        """Compute a chunk of prompts. When all is computed, the sequences join their batch."""
        self.drain()
        name = chunk.requests[0].name
        batch = self._prefills.pop(name, None)
        generations = self._prepared(chunk.requests) if batch is None else batch.generations
        if not generations:
            return
        try:
            batch = batch or self._begin(generations)
            self._adapters.use(batch.adapter)
            gives_way = any(running.is_kept and running.running for running in self.batches.values())
            self._asked = time.monotonic()
            with self._runner.between_layers(self._give_way) if gives_way else nullcontext():
                logits = batch.advance(None if chunk.is_last else chunk.stop)
            if logits is None:
                self._prefills[name] = batch
                return
            self._join(batch, choose_tokens(generations, logits))
        except Exception as error:  # noqa: BLE001  # its requests end
            self._fail_prefill(generations, error)

    def _prepared(self, requests: Sequence[Request]) -> list[Generation]:
        """Return the generations of requests. One that cannot be prepared ends."""
        prepared = list[Generation]()
        for request in requests:
            try:
                generation = self._preempted.pop(request.name, None)
                tokens = request.tokens if generation is None else generation.tokens
                reads_pixels = not (request.pixels and self._num_cached(request, tokens))
                if generation is None:
                    generation = Generation(request, self._runner.model, reads_pixels)
                else:
                    generation.restart(self._runner.model, reads_pixels)
                prepared.append(generation)
            except Exception as error:
                log.exception("a request could not be prepared")
                self.end({request.name: failed(error)})
        return prepared

    def _begin(self, generations: Sequence[Generation]) -> PrefillBatch:
        beginnings = [self._beginning(generation.request, generation.tokens) for generation in generations]
        self.num_cached_tokens += sum(row.length for row in beginnings if row is not None)
        return PrefillBatch(self._runner, generations, beginnings)

    def _beginning(self, request: Request, tokens: Sequence[int]) -> CachedRow | None:
        if not request.may_be_cached:
            return None
        return self.prefixes.find(request.adapter, request.key(tokens), request.least_cached)

    def _join(self, prefill: PrefillBatch, tokens: Sequence[int | Exception]) -> None:
        """Add the first tokens of prompts; the sequences that have not ended join the batch of their adapter."""
        adapter, prompts = prefill.adapter, [tuple(generation.tokens) for generation in prefill.generations]
        self._add_tokens(prefill.generations, tokens)
        if adapter not in self.batches:
            self.batches[adapter] = (
                UnbatchedSequences(self._runner)
                if self._runner.unbatched_reason
                else RowBatch(self._runner, self.scheduler.most_running, self._standing // (1 + len(self.batches)))
            )
        batch = self.batches[adapter]
        try:
            for at, (generation, prompt) in enumerate(zip(prefill.generations, prompts, strict=True)):
                row = prefill.row(at) if isinstance(batch, RowBatch) else prefill.cache
                if isinstance(batch, RowBatch) and self._caches_prefixes and generation.request.may_be_cached:
                    row = batch.hold(row, prefill.beginnings[at])
                    self.prefixes.add(adapter, generation.request.key(prompt), row)
                if self.scheduler.is_live(generation.request.name):
                    batch.join(generation, row)
                    self.scheduler.start(generation.request.name)
        finally:
            self._stepped.setdefault(adapter, time.monotonic())
            self._settle(adapter)

    def _give_way(self) -> None:
        """Take a step of the running sequences between two layers of a prompt, where their last one is old.

        A replay runs no code of the model, which is in the middle of a pass.
        """
        if self._gives_way:
            return
        now = time.monotonic()
        layer, self._asked = now - self._asked, now
        self._gives_way = True
        try:
            for adapter, batch in tuple(self.batches.items()):
                # What is enqueued now waits for a layer, and what is enqueued at the next chance for one more.
                age = now - self._stepped.get(adapter, 0.0)
                is_old = age >= _OLD_STEP or age + 2 * layer >= 1.5 * _OLD_STEP
                if is_old and batch.may_step_within_a_prompt:
                    self._step(adapter)
                    self.flush()
                    self._asked = time.monotonic()
        finally:
            self._gives_way = False

    def _fail_prefill(self, generations: Sequence[Generation], error: Exception) -> None:
        """End the requests of a failed prefill; those that lacked memory wait again, each to be prefilled alone."""
        running = self.scheduler.running.get(generations[0].request.adapter, {})
        left = [generation for generation in generations if generation.request.name not in running]
        hopeless = [generation.request.name for generation in left]
        if is_out_of_memory(error):
            log.error("memory was missing for %d prompts: %s", len(left), _words(error))
            self.forget()
            hopeless = self.scheduler.preempt_prefill(self._preempt(left))
        else:
            log.exception("prompts could not be computed")
        self.end({name: failed(error) for name in hopeless})

    # Steps -------------------------------------------------------------------------------------------------------
    def _decode(self, adapter: str) -> None:
        """Take one step with a batch. A fault ends its requests; with too little memory, fewer continue."""
        try:
            self._adapters.use(adapter)
        except Exception as error:  # noqa: BLE001  # its requests end
            self._fail_step(adapter, error, is_out_of_memory(error))
            return
        self._step(adapter, goes_ahead=len(self.scheduler.running) == 1 and not self.scheduler.has_prompts)

    def _step(self, adapter: str, *, goes_ahead: bool = False) -> None:
        """Take a step, or read the one that was begun ahead. With `goes_ahead`, begin the next one before, if it can.

        It does not go ahead where another adapter's step or a prompt is next: these would come later.
        """
        batch = self.batches[adapter]
        try:
            step = batch.step()
            choice = Choice.begin(step.rows, step.logits)
            if goes_ahead and isinstance(batch, RowBatch) and batch.may_step_ahead:
                batch.step_ahead(choice.tokens)
            self.flush()  # the events of the step before
            tokens = choice.read(batch.finish)
        except Exception as error:  # noqa: BLE001  # its requests end
            self._fail_step(adapter, error, is_out_of_memory(error))
            return
        self._stepped[adapter] = time.monotonic()
        try:
            self._add_tokens_of(adapter, step, tokens)
            self._settle(adapter)
        except Exception as error:  # noqa: BLE001  # its requests end
            self._fail_step(adapter, error, lacks_memory=False)

    def _add_tokens_of(self, adapter: str, step: BegunStep, tokens: Sequence[int | Exception]) -> None:
        """Add the tokens of a step to its sequences, of which those leave that end. Some may have left before."""
        batch = self.batches[adapter]
        of_step = dict(zip(step.rows, tokens, strict=True))
        running = tuple(batch.running)
        ends = self._add_tokens(running, [of_step[generation] for generation in running], later=batch.is_kept)
        for at in reversed(range(len(ends))):
            if (end := ends[at]) is not None:
                request, sequence = running[at].request, running[at].tokens[:-1]
                is_kept = self._caches_prefixes and request.may_be_cached and not end.error
                if is_kept and isinstance(batch, RowBatch):
                    self.prefixes.add(adapter, request.key(sequence), batch.row(at))
                batch.leave(at)

    def _fail_step(self, adapter: str, error: Exception, lacks_memory: bool) -> None:
        """End the requests of a failed step. Where memory was missing, half of them at a time are computed again.

        Some layers have the token of the step, some not. Pages stay, since cached prompts may be in them.
        """
        generations = self.batches[adapter].clear()
        self._settle(adapter)
        hopeless = [generation.request.name for generation in generations]
        if lacks_memory:
            log.error("memory was missing for a step of %d sequences: %s", len(generations), _words(error))
            self.forget()
            hopeless = self.scheduler.preempt_step(self._preempt(generations))
        else:
            log.exception("a step of decoding failed")
        self.end({name: failed(error) for name in hopeless})

    # Both --------------------------------------------------------------------------------------------------------
    def _preempt(self, generations: Sequence[Generation]) -> dict[str, Sequence[int]]:
        """Keep sequences for a prefill of all their tokens so far, and return these by name."""
        live = {
            generation.request.name: generation
            for generation in generations
            if self.scheduler.is_live(generation.request.name)
        }
        self._preempted.update(live)
        return {name: generation.tokens for name, generation in live.items()}

    def _add_tokens(
        self, generations: Sequence[Generation], tokens: Sequence[int | Exception], *, later: bool = False
    ) -> list[End | None]:
        """Add one token to each sequence, and emit them. Those for `later` wait for `flush`, if no sequence ends.

        A fault in the choice of a token ends its sequence alone.
        """
        events = [_next_event(generation, token) for generation, token in zip(generations, tokens, strict=True)]
        self._finish([event for event in events if self.scheduler.is_live(event.name)], later=later)
        return [event.end for event in events]

    def _finish(self, events: Sequence[Event], *, later: bool = False) -> None:
        """Forget the requests that end with these events, and emit them."""
        ended = [event.name for event in events if event.end is not None]
        self.scheduler.finish(ended)
        for name in ended:
            self._preempted.pop(name, None)
        self._prefills = {
            name: batch
            for name, batch in self._prefills.items()
            if any(self.scheduler.is_live(generation.request.name) for generation in batch.generations)
        }
        self._unsent += events
        if ended or not later:
            self.flush()

    def _settle(self, adapter: str) -> None:
        """Keep a batch that has become empty, if it has pages or graphs: cached prompts may be in its pages.

        Unused memory of empty batches is bounded. The batch that has been empty for longest releases its own first.
        """
        if self.batches[adapter].running:
            return
        self.batches[adapter] = self.batches.pop(adapter)
        for name, batch in tuple(self.batches.items()):
            if batch.running or (batch.is_kept and self._num_idle_bytes <= self._most_idle_bytes):
                continue
            if batch.pool is None or (self._num_idle_bytes > self._most_idle_bytes and not batch.pool.used):
                del self.batches[name]
            elif self._num_idle_bytes > self._most_idle_bytes and batch.pool.is_mostly_unused:
                batch.compact()

    @property
    def _num_idle_bytes(self) -> int:
        empty = [batch for batch in self.batches.values() if not batch.running]
        return sum(batch.nbytes if batch.pool is None else batch.pool.unused_bytes for batch in empty)


def _next_event(generation: Generation, token: int | Exception) -> Event:
    """Add a token to a sequence; a fault is its end."""
    name = generation.request.name
    try:
        if isinstance(token, Exception):
            raise token
        return Event(name, (token,), generation.add(token))
    except Exception as error:  # noqa: BLE001  # the other sequences of the batch continue
        log.error("a token could not be chosen: %s", _words(error))
        return Event(name, (), failed(error))


def failed(error: Exception) -> End:
    """Return the end of a request that an exception ended."""
    if isinstance(error, SchemaTooComplex):
        return End(None, str(error), "schema_too_complex")
    return End(None, _words(error), "out_of_memory" if is_out_of_memory(error) else "generation_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory was missing, on the host (which PyTorch reports as a RuntimeError) or on a device."""
    fault = memory_fault(error)
    return fault is not None and fault.code != "U117"


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

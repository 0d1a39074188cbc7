"""`Engine`: one thread that answers many requests, which join and leave running batches.

In: frozen `Request`s. Out: `Event`s with their tokens, one list for each step. A turn of the thread reads prompts, at
most a chunk of tokens, and then takes one step with the batch of every adapter. A fault ends the requests that it
concerns with an error, and the thread continues.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, TypeVar

from ktc.foundation.memory_faults import memory_fault
from ktc.inference.serving.batch import LoneBatch, RowBatch
from ktc.inference.serving.decoder import Decoder, choose
from ktc.inference.serving.generation import Generation
from ktc.inference.serving.prefix_cache import PrefixCache
from ktc.inference.serving.reading import Reading
from ktc.inference.serving.request import End, Event, Limits, Refused, Request

log = logging.getLogger(__name__)

Emit = Callable[[Sequence[Event]], None]
Result = TypeVar("Result")
_KEPT = 1 << 30  # bytes of pages of empty batches that no sequence uses
_PADDED = 1.5  # prompts are read side by side with at most this many times their tokens


class Adapters(Protocol):
    """The adapters of a model."""

    def use(self, name: str) -> None:
        """Make one active, or none for ""."""
        ...

    def remove(self, name: str) -> None:
        """Remove one, which no request uses."""
        ...


class NoAdapters:
    """No adapters, or one that is always active."""

    def use(self, name: str) -> None:
        """Do nothing."""

    def remove(self, name: str) -> None:
        """Do nothing."""


class _Change(NamedTuple):
    """A function that changes the model, and its result. It is called between turns, or when nothing runs (`idle`)."""

    call: Callable[[], Any]
    idle: bool
    result: Future[Any]


class Engine:
    """`start` before `submit`; `emit` is called on the engine's thread and must return soon."""

    def __init__(self, decoder: Decoder, limits: Limits, emit: Emit, adapters: Adapters | None = None) -> None:
        self.limits = limits
        self._decoder, self._emit, self._adapters = decoder, emit, adapters or NoAdapters()
        self._thread = threading.Thread(target=self._run, name="ktc-serving", daemon=True)
        # Shared with other threads, under `_changed`.
        self._changed = threading.Condition()
        self._waiting: deque[Request] = deque()
        self._cancelled: set[str] = set()
        self._active: set[str] = set()
        self._changes: deque[_Change] = deque()
        self._retired: set[str] = set()  # adapters that no new request may use
        self._retiring: set[str] = set()  # of them, those that are not removed yet
        self._stopping = self._aborting = self._applying = False
        # Of the engine's thread.
        self._reading: Reading | None = None
        self._apart: set[str] = set()  # requests that are read alone, since memory was missing beside others
        self._begun: dict[str, Generation] = {}  # waiting requests, whose tokens so far are read again
        self._most_rows = limits.batch  # fewer where memory was missing for a step; one more after each that ends
        self._batches: dict[str, RowBatch | LoneBatch] = {}
        self._empty: dict[str, RowBatch] = {}  # that have pages
        self._prefixes = PrefixCache(0 if decoder.alone else limits.prefix_bytes)
        self.cached_tokens = 0  # of prompts, which were not read again

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Take on a request. Raises Refused."""
        most = self.longest
        if most is not None and request.longest > most:
            what = f"{len(request.tokens)} tokens and {request.max_new_tokens} new ones"
            raise Refused("too long", f"{what} do not fit the cache, which has room for {most}")
        with self._changed:
            if self._stopping:
                raise Refused("stopping", "the server stops")
            if request.adapter in self._retired:
                raise Refused("busy", "its adapter was replaced in this moment")
            if len(self._active) >= self.limits.batch + self.limits.waiting:
                raise Refused("busy", f"{len(self._active)} requests are running or waiting")
            self._active.add(request.name)
            self._waiting.append(request)
            self._changed.notify()

    def cancel(self, name: str) -> None:
        """End a request at the next step; an unknown name is ignored."""
        with self._changed:
            if name in self._active:
                self._cancelled.add(name)
                self._changed.notify()

    def change(self, call: Callable[[], Result], *, idle: bool = False, patience: float | None = None) -> Result:
        """Call a function that changes the model on the engine's thread, between two turns, and return its result.

        With `idle` it waits until the running requests have ended, while new ones wait for it. Not to be called on the
        engine's thread. Raises what the function raises, TimeoutError if it was not called within `patience` seconds,
        and Refused where the engine stops.
        """
        made = _Change(call, idle, Future())
        with self._changed:
            if self._stopping:
                raise Refused("stopping", "the server stops")
            self._changes.append(made)
            self._changed.notify()
        try:
            return made.result.result(patience)
        except TimeoutError:
            if not made.result.cancel():  # it is being called
                return made.result.result()
            with self._changed:
                self._changed.notify()
            raise

    def retire(self, adapter: str) -> None:
        """Remove an adapter when no request uses it any more. New requests for it are refused."""
        with self._changed:
            self._retired.add(adapter)
            self._retiring.add(adapter)
            self._changed.notify()

    def forget(self) -> None:
        """Drop keys and values of earlier prompts, and native steps: for a change of weights, on this thread."""
        self._prefixes.clear()
        self._empty.clear()
        for batch in self._batches.values():
            if isinstance(batch, RowBatch):
                batch.compact()

    def refuse(self) -> None:
        """Refuse new requests from now on."""
        with self._changed:
            self._stopping = True

    def stop(self, grace: float = 0.0) -> None:
        """Refuse new requests, answer the running ones for at most `grace` seconds, and end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
            if grace:
                self._changed.wait_for(lambda: not self._active, grace)
            self._aborting = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def num_active(self) -> int:
        """The number of requests that have not ended."""
        return len(self._active)

    @property
    def is_stopping(self) -> bool:
        """Whether new requests are refused for ever."""
        return self._stopping

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def not_ready(self) -> str:
        """Why new requests would not be answered soon, or "": the server stops, or new weights wait or are copied."""
        if self._stopping:
            return "stopping"
        if not self._thread.is_alive():
            return "stopped"
        with self._changed:
            return "taking new weights" if self._applying or self._must_drain else ""

    @property
    def longest(self) -> int | None:
        """The longest sequence that the cache has room for; None without a limit."""
        nbytes = self.limits.cache_bytes
        return None if nbytes is None or self._decoder.alone else self._decoder.size.tokens(nbytes)

    @property
    def num_waiting(self) -> int:
        """The number of requests whose prompts are not read yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """The number of requests that take steps."""
        return sum(len(batch.running) for batch in list(self._batches.values()))

    @property
    def cache_bytes(self) -> int:
        """The memory of the keys and values of running requests."""
        return sum(batch.nbytes for batch in list(self._batches.values()))

    @property
    def prefix_bytes(self) -> int:
        """The memory of the keys and values kept for prompts with the same beginning."""
        return self._prefixes.nbytes

    # The thread -------------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_news or self._has_work)
                if self._aborting:
                    break
            try:
                self._turn()
            except Exception as error:  # no request may wait for ever
                log.exception("the engine failed, and ends all of its requests")
                self._fail_all(error)
        self._finish({name: End(None, "the server stops", "stopping") for name in self._active})
        for change in self._changes:
            if change.result.set_running_or_notify_cancel():
                change.result.set_exception(Refused("stopping", "the server stops"))

    @property
    def _has_news(self) -> bool:
        return bool(self._waiting or self._cancelled or self._changes or self._retiring or self._aborting)

    @property
    def _has_work(self) -> bool:
        return self._reading is not None or bool(self._batches)

    def _turn(self) -> None:
        self._drop_cancelled()
        self._change()
        self._remove_retired()
        self._read()
        for adapter in list(self._batches):
            self._step(adapter)

    def _drop_cancelled(self) -> None:
        with self._changed:
            gone, self._cancelled = self._cancelled, set()
            self._waiting = deque(each for each in self._waiting if each.name not in gone)
        if not gone:
            return
        for adapter, batch in list(self._batches.items()):
            for at in reversed(range(len(batch.running))):
                if batch.running[at].request.name in gone:
                    self._leave(adapter, at)
        if self._reading is not None and all(each.request.name in gone for each in self._reading.generations):
            self._reading = None
        self._finish({name: End("cancelled") for name in gone})

    # Changes of the model ---------------------------------------------------------------------------------------------
    def _change(self) -> None:
        """Call the functions that wait, up to one that waits for running requests."""
        while change := self._next_change():
            if not change.result.set_running_or_notify_cancel():
                continue
            self._applying = change.idle
            try:
                change.result.set_result(change.call())
            except Exception as error:
                log.exception("a change of the model failed")
                change.result.set_exception(error)
            finally:
                self._applying = False

    def _next_change(self) -> _Change | None:
        with self._changed:
            if self._must_drain and self._has_work:
                return None
            return self._changes.popleft() if self._changes else None

    @property
    def _must_drain(self) -> bool:
        """Whether the next change waits for running requests."""
        while self._changes and self._changes[0].result.cancelled():
            self._changes.popleft()
        return bool(self._changes) and self._changes[0].idle

    def _remove_retired(self) -> None:
        with self._changed:
            used = {each.adapter for each in self._waiting} | self._batches.keys()
            if self._reading is not None:
                used.add(self._reading.adapter)
            removed, self._retiring = self._retiring - used, self._retiring & used
        for adapter in removed:
            self._prefixes.clear(adapter)
            self._empty.pop(adapter, None)
            try:
                self._adapters.remove(adapter)
            except Exception:
                log.exception("an adapter could not be removed; its memory stays in use")

    # Prompts ----------------------------------------------------------------------------------------------------------
    def _read(self) -> None:
        """Read prompts, a chunk of tokens in all. A prompt that takes longer leaves half of it to short ones."""
        left = self.limits.prefill_chunk
        self._reading = self._reading or self._next_reading()
        if self._reading is not None and self._reading.left > left and not self._decoder.alone:
            kept = left - left // 2
            while left > kept and (beside := self._next_reading(left - kept)) is not None:
                left -= self._advance(beside, beside.left)
        while left > 0:
            reading = self._reading = self._reading or self._next_reading()
            if reading is None:
                return
            if reading.left > left and 2 * left < self.limits.prefill_chunk and not self._decoder.alone:
                return  # a pass over few tokens reads nearly all experts: these prompts begin with the next chunk
            left -= self._advance(reading, reading.left if self._decoder.alone else left)

    def _advance(self, reading: Reading, most: int) -> int:
        """Read the next tokens, about `most`; return how many. When all are read, the sequences join their batch."""
        read = most
        try:
            self._adapters.use(reading.adapter)
            read = reading.advance(most)
            done = reading.scores is not None
            if done:
                self._join(reading)
        except Exception as error:
            done = True
            batch = self._batches.get(reading.adapter)
            joined = set[int]() if batch is None else set(map(id, batch.running))
            left = [each for each in reading.generations if id(each) not in joined]
            if is_out_of_memory(error):
                self._read_apart(left, error)
            else:
                log.exception("prompts could not be read")
                self._fail(left, error)
        if done and reading is self._reading:
            self._reading = None
        return read

    def _read_apart(self, generations: Sequence[Generation], error: Exception) -> None:
        """Free what is kept for later, and read each prompt again, alone; one that was alone is refused."""
        log.error("memory was missing for %d prompts: %s", len(generations), _words(error))
        self.forget()
        again = [each for each in generations if each.request.name not in self._apart]
        self._fail([each for each in generations if each.request.name in self._apart], error)
        self._apart.update(each.request.name for each in again)
        self._wait_again(again)

    def _wait_again(self, generations: Sequence[Generation]) -> None:
        """Put requests before those that wait. They keep the tokens that they have."""
        with self._changed:
            active = [each for each in generations if each.request.name in self._active]
            self._begun.update((each.request.name, each) for each in active)
            self._waiting.extendleft(each.request for each in reversed(active))

    def _next_reading(self, most: int | None = None) -> Reading | None:
        """Prepare the next requests that there is room for; with `most`, those that this many tokens complete."""
        prepared = [each for request in self._admitted(most) if (each := self._prepared(request)) is not None]
        if not prepared:
            return None
        known = [self._prefixes.find(each.request.adapter, each.tokens) for each in prepared]
        self.cached_tokens += sum(row.length for row in known if row is not None)
        return Reading(self._decoder, prepared[0].request.adapter, prepared, known)

    def _prepared(self, request: Request) -> Generation | None:
        try:
            if (begun := self._begun.pop(request.name, None)) is None:
                return Generation(request, self._decoder.model)
            begun.begin_again(self._decoder.model)
            return begun
        except Exception as error:
            log.exception("a request could not be prepared")
            self._finish({request.name: failed(error)})
            return None

    def _admitted(self, most: int | None) -> list[Request]:
        """Take the first waiting request, and others to read beside it, where there is room, of like lengths first.

        With `most`, requests with more tokens to read are passed over.
        """
        with self._changed:
            if self._must_drain:
                return []
            waiting = [each for each in self._waiting if each.name not in self._cancelled]
        if most is not None:
            waiting = [each for each in waiting[: 2 * self.limits.batch] if self._rest(each) <= most]
        first = len(waiting[0].tokens) if waiting else 0
        found, rests = list[Request](), list[int]()
        others = sorted(waiting[1 : 2 * self.limits.batch], key=lambda each: abs(len(each.tokens) - first))
        for request in [*waiting[:1], *others]:
            if self._has_room([*found, request]):
                rest = self._rest(request)
                if not found or self._is_beside(found[0], request, [*rests, rest], most):
                    found.append(request)
                    rests.append(rest)
            elif not found:
                break
        with self._changed:
            for request in found:
                self._waiting.remove(request)
        return found

    def _rest(self, request: Request) -> int:
        """Return the tokens of a prompt that are not cached."""
        return len(request.tokens) - self._prefixes.length(request.adapter, request.tokens)

    def _is_beside(self, first: Request, request: Request, rests: Sequence[int], most: int | None) -> bool:
        """Return whether a request can be read beside others: `rests` are the tokens to read, its own the last."""
        if self._decoder.alone or first.adapter != request.adapter or {first.name, request.name} & self._apart:
            return False
        windows = self._decoder.size.has_windows
        if windows and (rests[-1] < len(request.tokens) or self._rest(first) < len(first.tokens)):
            return False
        limit = self.limits.prefill_chunk if most is None else most
        return len(rests) * max(rests) <= min(limit, _PADDED * sum(rests))

    def _has_room(self, asked: Sequence[Request]) -> bool:
        """Return whether these requests can run with those that run, or are being read."""
        asked = [*asked, *(each.request for each in (self._reading.generations if self._reading else ()))]
        if self.num_running + len(asked) > self._most_rows:
            return False
        if self.limits.cache_bytes is None or self._decoder.alone:
            return True
        running = {name: [each.request.longest for each in batch.running] for name, batch in self._batches.items()}
        for each in asked:
            running.setdefault(each.adapter, []).append(each.longest)
        return sum(map(self._decoder.bytes_of, running.values())) <= self.limits.cache_bytes

    def _join(self, reading: Reading) -> None:
        """Choose the first tokens of prompts that are read; the others join the batch."""
        assert reading.scores is not None
        read = [tuple(each.tokens) for each in reading.generations]
        tokens = choose(reading.generations, reading.scores)
        ends = self._add(reading.generations, tokens)
        batch = self._batches.pop(reading.adapter, None) or self._new_batch(reading.adapter)
        try:
            for at, (generation, end) in enumerate(zip(reading.generations, ends, strict=True)):
                continues = end is None and generation.request.name in self._active
                if isinstance(batch, LoneBatch):
                    if continues:
                        batch.join(generation, reading.cache)
                    continue
                row = reading.row(at)
                if self.limits.prefix_bytes:
                    row = batch.hold(row, reading.beginning(at))
                    self._prefixes.add(reading.adapter, read[at], row)
                if continues:
                    batch.join(generation, row)
        finally:
            if batch.running:
                self._batches[reading.adapter] = batch
            else:
                self._keep(reading.adapter, batch)

    def _new_batch(self, adapter: str) -> RowBatch | LoneBatch:
        if self._decoder.alone:
            return LoneBatch(self._decoder)
        return self._empty.pop(adapter, None) or RowBatch(self._decoder)

    def _keep(self, adapter: str, batch: RowBatch | LoneBatch) -> None:
        """Keep an empty batch that has pages: kept prompts may be in them, and native steps know them.

        Their unused pages are bounded; the batch that was used first gives its own back first.
        """
        if not isinstance(batch, RowBatch) or batch.pool is None:
            return
        self._empty[adapter] = batch
        for name, each in list(self._empty.items()):
            pools = [each.pool for each in self._empty.values() if each.pool is not None]
            if sum(pool.unused_bytes for pool in pools) <= _KEPT:
                return
            assert each.pool is not None
            if not each.pool.used:
                del self._empty[name]
            elif each.pool.is_mostly_unused:
                each.compact()

    # Steps ------------------------------------------------------------------------------------------------------------
    def _step(self, adapter: str) -> None:
        """Take one step with a batch. A fault ends its requests; with too little memory, fewer continue."""
        batch = self._batches[adapter]
        try:
            self._adapters.use(adapter)
            scores = batch.step()
        except Exception as error:
            running = self._dropped(adapter)
            if is_out_of_memory(error):
                self._go_on_with_fewer(running, error)
            else:
                log.exception("a step of decoding failed")
                self._fail(running, error)
            return
        try:
            tokens = choose(batch.running, scores)
            ends = self._add(batch.running, tokens)
            for at in reversed(range(len(ends))):
                if (end := ends[at]) is not None:
                    if self.limits.prefix_bytes and isinstance(batch, RowBatch) and not end.error:
                        self._prefixes.add(adapter, batch.running[at].tokens[:-1], batch.row(at))
                    self._leave(adapter, at)
        except Exception as error:
            log.exception("a step of decoding failed")
            self._fail(self._dropped(adapter), error)

    def _dropped(self, adapter: str) -> list[Generation]:
        """Remove the sequences of a batch, and return them. Its pages stay, since kept sequences may be in them."""
        batch = self._batches.pop(adapter, None)
        if batch is None:
            return []
        running = batch.clear()
        self._keep(adapter, batch)
        return running

    def _go_on_with_fewer(self, generations: Sequence[Generation], error: Exception) -> None:
        """Read the sequences of a failed step again, half of them at a time: some layers have its token, some not.

        One that was alone is refused.
        """
        log.error("memory was missing for a step of %d sequences: %s", len(generations), _words(error))
        self.forget()
        self._most_rows = max(1, len(generations) // 2)
        if len(generations) > 1:
            self._wait_again(generations)
        else:
            self._fail(generations, error)

    def _leave(self, adapter: str, at: int) -> None:
        batch = self._batches[adapter]
        batch.leave(at)
        self._most_rows = min(self.limits.batch, self._most_rows + 1)
        if not batch.running:
            del self._batches[adapter]
            self._keep(adapter, batch)

    def _add(self, generations: Sequence[Generation], tokens: Sequence[int | Exception]) -> list[End | None]:
        """Add one token to each sequence, and emit them. A fault in the choice of a token ends its sequence alone."""
        events = [_next_event(each, token) for each, token in zip(generations, tokens, strict=True)]
        self._emit([event for event in events if event.name in self._active])
        self._forget(event.name for event in events if event.end is not None)
        return [event.end for event in events]

    # Ends -------------------------------------------------------------------------------------------------------------
    def _fail(self, generations: Iterable[Generation], error: Exception) -> None:
        self._finish({each.request.name: failed(error) for each in generations})

    def _fail_all(self, error: Exception) -> None:
        self._reading, self._batches = None, {}
        with self._changed:
            self._waiting.clear()
            names = list(self._active)
        self._finish({name: failed(error) for name in names})

    def _finish(self, ends: dict[str, End]) -> None:
        """Emit ends without a token, for requests that have not ended before."""
        with self._changed:
            events = [Event(name, (), end) for name, end in ends.items() if name in self._active]
        self._forget(ends)
        if events:
            self._emit(events)

    def _forget(self, names: Iterable[str]) -> None:
        with self._changed:
            gone = list(names)
            self._active.difference_update(gone)
            self._apart.difference_update(gone)
            for name in gone:
                self._begun.pop(name, None)
            self._changed.notify_all()


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
    return End(None, _words(error), "out_of_memory" if is_out_of_memory(error) else "generation_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory was missing, on the host (which PyTorch reports as a RuntimeError) or on a device."""
    fault = memory_fault(error)
    return fault is not None and fault.code != "U117"


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

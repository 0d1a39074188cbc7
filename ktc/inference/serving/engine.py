"""`Engine`: the thread that owns a model, and what other threads ask of it.

In: frozen `Request`s. Out: `Event`s with their tokens, one list for each pass. Each iteration prefills, at most a chunk
of tokens, and then takes one step with the batch of every adapter. Requests and cancellations are taken in between two
passes, changes of the model between two iterations.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from ktc.inference.serving.model_runner import ModelRunner
from ktc.inference.serving.models import LoadedAdapters
from ktc.inference.serving.request import End, Event, Limits, Refused, Request
from ktc.inference.serving.worker import Emit, Worker, failed

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class _Change(NamedTuple):
    """A function that changes the model, and its result. With `idle` it waits until nothing runs."""

    call: Callable[[], Any]
    idle: bool
    result: Future[Any]


class Engine:
    """`emit` is called on the engine's thread and must return soon."""

    def __init__(self, runner: ModelRunner, limits: Limits, emit: Emit, adapters: LoadedAdapters | None = None) -> None:
        self.limits = limits
        self.max_length = _max_length(runner, limits)
        """The longest sequence that the cache has room for; None without a limit."""
        self._emit = emit
        self._thread = threading.Thread(target=self._run, name="ktc-serving", daemon=True)
        # Shared with other threads, under `_changed`.
        self._changed = threading.Condition()
        self._new: deque[Request] = deque()
        self._cancelled: set[str] = set()
        self._active: set[str] = set()
        self._changes: deque[_Change] = deque()
        self._retired: set[str] = set()  # adapters that no new request may use
        self._retiring: set[str] = set()  # of them, those that are not removed yet
        self._stopping = self._aborting = self._applying = False
        # Of the engine's thread.
        self._worker = Worker(runner, limits, self._pass_on, adapters)
        self._scheduler = self._worker.scheduler

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Take on a request. Raises Refused."""
        if self.max_length is not None and request.max_cached_tokens > self.max_length:
            what = f"{len(request.tokens)} tokens and {request.max_new_tokens} new ones"
            raise Refused("too long", f"{what} do not fit the cache, which has room for {self.max_length}")
        with self._changed:
            if self._stopping:
                raise Refused("stopping", "the server stops")
            if request.adapter in self._retired:
                raise Refused("busy", "its adapter was replaced in this moment")
            if len(self._active) >= self.limits.batch + self.limits.waiting:
                raise Refused("busy", f"{len(self._active)} requests are running or waiting")
            self._active.add(request.name)
            self._new.append(request)
            self._changed.notify()

    def cancel(self, name: str) -> None:
        """End a request after the current pass; an unknown name is ignored."""
        with self._changed:
            if name in self._active:
                self._cancelled.add(name)
                self._changed.notify()

    def change(self, call: Callable[[], Result], *, idle: bool = False, patience: float | None = None) -> Result:
        """Call a function that changes the model on the engine's thread, between iterations, and return its result.

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
        """Drop keys and values of earlier prompts, and recorded steps: for a change of weights, on this thread.

        Steps that were captured before the first request are captured again.
        """
        self._worker.renew()

    def capture(self, adapter: str) -> None:
        """Capture the steps of an adapter's batch, where they are CUDA graphs. The engine must have started."""
        self.change(lambda: self._worker.capture(adapter))

    def refuse(self) -> None:
        """Refuse new requests from now on."""
        with self._changed:
            self._stopping = True

    def stop(self) -> None:
        """Refuse new requests, end the running ones, and end the thread."""
        with self._changed:
            self._stopping = self._aborting = True
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
    def not_ready(self) -> str:
        """The reason why new requests wait: the server stops, or takes new weights. "" for none."""
        if self._stopping:
            return "stopping"
        if not self._thread.is_alive():
            return "stopped"
        with self._changed:
            return "taking new weights" if self._applying or self._must_drain else ""

    @property
    def lacks_steps(self) -> bool:
        """Whether steps of batches that no request uses are still captured."""
        return self._worker.lacks_steps

    @property
    def num_waiting(self) -> int:
        """The number of requests whose prompts are not prefilled yet."""
        return len(self._new) + len(self._scheduler.waiting)

    @property
    def num_running(self) -> int:
        """The number of requests that take steps."""
        return self._scheduler.num_running

    @property
    def num_cached_tokens(self) -> int:
        """The number of tokens of prompts that were cached."""
        return self._worker.num_cached_tokens

    @property
    def cache_bytes(self) -> int:
        """The memory of the keys and values of running requests."""
        return sum(batch.nbytes for batch in list(self._worker.batches.values()) if batch.running)

    @property
    def prefix_bytes(self) -> int:
        """The memory of the prefix cache."""
        return self._worker.prefixes.nbytes

    # The thread -------------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_busy or self._worker.lacks_steps)
                if self._aborting:
                    break
                is_busy = self._is_busy
            try:
                if is_busy:
                    self._iterate()
                else:
                    self._worker.capture_one()
            except Exception as error:  # no request may wait for ever
                log.exception("the engine failed, and ends all of its requests")
                self._end_all(failed(error))
        self._end_all(End(None, "the server stops", "stopping"))
        for change in self._changes:
            if change.result.set_running_or_notify_cancel():
                change.result.set_exception(Refused("stopping", "the server stops"))

    def _iterate(self) -> None:
        self._take_news()
        self._apply_changes()
        self._remove_retired()
        for decision in self._scheduler.schedule():
            self._worker.execute(decision)
            self._take_news()
        if not self._scheduler.num_running:
            self._worker.flush()

    @property
    def _is_busy(self) -> bool:
        return bool(self._has_news or self._scheduler.waiting or self._scheduler.has_work)

    @property
    def _has_news(self) -> bool:
        return bool(self._new or self._cancelled or self._changes or self._retiring or self._aborting)

    def _take_news(self) -> None:
        """Pass new and cancelled requests on to the scheduler."""
        with self._changed:
            new, self._new = self._new, deque()
            cancelled, self._cancelled = self._cancelled, set()
            self._scheduler.is_draining = self._must_drain
            for request in new:
                self._scheduler.add(request)
        if cancelled:
            self._worker.end(dict.fromkeys(cancelled, End("cancelled")))

    def _pass_on(self, events: Sequence[Event]) -> None:
        with self._changed:
            self._active.difference_update(event.name for event in events if event.end is not None)
        self._emit(events)

    def _end_all(self, end: End) -> None:
        self._take_news()
        self._worker.abort(end)

    # Changes of the model ---------------------------------------------------------------------------------------------
    def _apply_changes(self) -> None:
        """Call the functions that wait, up to one that waits for running requests."""
        while change := self._next_change():
            if not change.result.set_running_or_notify_cancel():
                continue
            self._applying = change.idle
            self._worker.drain()
            try:
                change.result.set_result(change.call())
            except Exception as error:
                log.exception("a change of the model failed")
                change.result.set_exception(error)
            finally:
                self._applying = False
        with self._changed:
            self._scheduler.is_draining = self._must_drain

    def _next_change(self) -> _Change | None:
        with self._changed:
            if self._must_drain and self._scheduler.has_work:
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
            used = {request.adapter for request in (*self._new, *self._scheduler.live)}
            removed, self._retiring = self._retiring - used, self._retiring & used
        for adapter in removed:
            self._worker.remove_adapter(adapter)


def _max_length(runner: ModelRunner, limits: Limits) -> int | None:
    if limits.cache_bytes is None or runner.unbatched_reason:
        return None
    return runner.size.max_tokens(limits.cache_bytes)

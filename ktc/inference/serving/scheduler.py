"""`Scheduler`: which prompts are prefilled and which sequences decode, without a thread, a model or a tensor.

In: requests, and reports of what became of a decision. Out: frozen decisions, one pass of the model each.
A request waits, is a row of a prefill, and then runs. It is preempted where memory was missing for its pass: it waits
before the others, with its tokens so far. Memory is reserved for the longest that a request can become.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from ktc.inference.serving.cache_size import CacheSize
from ktc.inference.serving.request import Limits, Request

_MAX_PADDING: Final = 1.5  # padded tokens of a prefill, by those of its prompts


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Compute the columns from `start` to `stop` of prompts, which are padded on the left to the same width.

    With `start` 0 the prefill begins. The last chunk ends it, also where less is cached by then than it was.
    """

    requests: tuple[Request, ...]
    start: int
    stop: int
    is_last: bool = True


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Compute the next token of every running sequence of an adapter."""

    adapter: str


SchedulerOutput = PrefillChunk | DecodeStep


class Scheduler:
    """Decides pass by pass. Between two passes its caller reports which requests run, ended or were preempted."""

    def __init__(
        self, limits: Limits, size: CacheSize | None, num_cached: Callable[[Request, Sequence[int]], int]
    ) -> None:
        """Begin without requests. `size` None: sequences share no cache, and each is prefilled in one pass.

        `num_cached` returns how many first tokens of a request are in the prefix cache, of all of its tokens so far.
        """
        self.waiting: deque[Request] = deque()
        self.running: dict[str, dict[str, Request]] = {}  # by adapter and name
        self.is_draining = False  # no waiting request is admitted
        self._limits, self._size, self._num_cached = limits, size, num_cached
        self._live: dict[str, Request] = {}
        self._prefill: _Prefill | None = None
        self._preempted: dict[str, tuple[int, ...]] = {}  # tokens so far of waiting requests
        self._prefill_alone: set[str] = set()  # requests whose prefill beside others lacked memory
        self._max_num_seqs = limits.batch  # fewer after a step that lacked memory; one more after each request

    @property
    def num_running(self) -> int:
        """The number of sequences that decode."""
        return sum(map(len, list(self.running.values())))

    @property
    def most_running(self) -> int:
        """The most sequences that may decode at once."""
        return self._limits.batch

    @property
    def has_work(self) -> bool:
        """Whether a prefill has begun, or a sequence runs."""
        return self._prefill is not None or bool(self.running)

    @property
    def has_prompts(self) -> bool:
        """Whether the next iteration reads prompts."""
        if self._prefill is not None:
            return True
        return bool(self.waiting) and not self.is_draining and self._has_room((self.waiting[0],))

    @property
    def live(self) -> tuple[Request, ...]:
        """The requests that have not ended."""
        return tuple(self._live.values())

    def is_live(self, name: str) -> bool:
        """Return whether a request has not ended."""
        return name in self._live

    # Reports -----------------------------------------------------------------------------------------------------
    def add(self, request: Request) -> None:
        """Let a new request wait."""
        self._live[request.name] = request
        self.waiting.append(request)

    def start(self, name: str) -> None:
        """Let a request run, whose prompt is prefilled."""
        request = self._live[name]
        self.running.setdefault(request.adapter, {})[name] = request
        self._leave_prefill({name})

    def finish(self, names: Iterable[str]) -> None:
        """Forget requests that have ended, wherever they are."""
        gone = {name for name in names if self._live.pop(name, None) is not None}
        if waiting := gone.intersection(request.name for request in self.waiting):
            self._leave_queue(waiting)
        num_ended = self.num_running
        self._stop_running(gone)
        num_ended -= self.num_running
        self._max_num_seqs = min(self._limits.batch, self._max_num_seqs + num_ended)
        self._leave_prefill(gone)
        self._prefill_alone -= gone
        for name in gone:
            self._preempted.pop(name, None)

    def preempt_prefill(self, tokens: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
        """Let requests wait again whose prefill lacked memory, each to be prefilled alone.

        In: their tokens so far. Return those that were alone, for which there is no remedy.
        """
        hopeless = tuple(name for name in tokens if name in self._prefill_alone)
        self._preempt({name: of for name, of in tokens.items() if name not in hopeless})
        self._prefill_alone |= tokens.keys()
        return hopeless

    def preempt_step(self, tokens: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
        """Let the sequences of a step that lacked memory wait again; half as many run at once from then on.

        In: their tokens so far. Return the one that ran alone, for which there is no remedy.
        """
        self._max_num_seqs = max(1, len(tokens) // 2)
        if len(tokens) > 1:
            self._preempt(tokens)
            return ()
        self._stop_running(set(tokens))
        return tuple(tokens)

    def _preempt(self, tokens: Mapping[str, Sequence[int]]) -> None:
        names = set(tokens)
        self._stop_running(names)
        self._leave_prefill(names)
        self._preempted.update((name, tuple(of)) for name, of in tokens.items())
        self.waiting.extendleft(self._live[name] for name in reversed(tuple(tokens)))

    # Decisions ---------------------------------------------------------------------------------------------------
    def schedule(self) -> Iterator[SchedulerOutput]:
        """Yield the passes of one iteration: prompts, `prefill_chunk` tokens in all, then a step of each adapter."""
        yield from self._prefills()
        for adapter in tuple(self.running):
            if adapter in self.running:
                yield DecodeStep(adapter)

    def _prefills(self) -> Iterator[PrefillChunk]:
        """Yield chunks of prompts. A prompt that takes longer than an iteration leaves half of it to short ones."""
        budget = chunk = self._limits.prefill_chunk
        batched = self._size is not None
        self._prefill = self._prefill or self._admit(chunk)
        if self._prefill is not None and self._prefill.num_left > chunk and batched:
            for_short = budget // 2
            while for_short > 0 and (short := self._admit(for_short, short=True)) is not None:
                for_short -= short.num_left
                budget -= short.num_left
                yield short.advance(short.num_left)
        while budget > 0:
            prefill = self._prefill = self._prefill or self._admit(chunk)
            if prefill is None:
                return
            if prefill.num_left > budget and 2 * budget < chunk and batched:
                return  # a pass over few tokens reads nearly all experts: the prompts begin with the next iteration
            before = prefill.num_left
            decided = prefill.advance(budget if batched and not prefill.is_whole else before)
            budget -= before - prefill.num_left
            if not prefill.num_left:
                self._prefill = None
            yield decided

    def _admit(self, max_tokens: int, *, short: bool = False) -> _Prefill | None:
        """Take the first waiting request, and others to prefill beside it, where there is room, of like lengths first.

        `max_tokens` bounds the tokens of several, padding included; with `short` also those of the first.
        """
        if self.is_draining:
            return None
        window = list(islice(self.waiting, 2 * self._limits.batch))
        if short:
            window = [request for request in window if self._num_uncached(request) <= max_tokens]
        by_length = sorted(window[1:], key=lambda request: abs(len(request.tokens) - len(window[0].tokens)))
        rows = dict[str, int]()  # tokens to compute, by the names of requests
        admitted = list[Request]()
        for request in (*window[:1], *by_length):
            if not self._has_room((*admitted, request)):
                if not admitted:
                    return None
                continue
            num_uncached = self._num_uncached(request)
            if not admitted or self._is_beside(admitted[0], request, (*rows.values(), num_uncached), max_tokens):
                admitted.append(request)
                rows[request.name] = num_uncached
        if not admitted:
            return None
        self._leave_queue(rows.keys())
        for name in rows:
            self._preempted.pop(name, None)
        return _Prefill(tuple(admitted), max(rows.values()))

    def _num_uncached(self, request: Request) -> int:
        """Return the number of tokens to prefill."""
        tokens = self._tokens(request)
        return len(tokens) - self._num_cached(request, tokens)

    def _tokens(self, request: Request) -> tuple[int, ...]:
        return self._preempted.get(request.name, request.tokens)

    def _is_beside(self, first: Request, request: Request, rows: Sequence[int], max_tokens: int) -> bool:
        """Return whether a request can be prefilled beside others; `rows` are the tokens to compute, its own last."""
        if self._size is None or first.adapter != request.adapter or {first.name, request.name} & self._prefill_alone:
            return False
        if first.pixels or request.pixels:
            return False
        if self._size.has_windows and (rows[-1] < len(self._tokens(request)) or rows[0] < len(self._tokens(first))):
            return False  # several rows over cached beginnings need a cache without windows
        return len(rows) * max(rows) <= min(max_tokens, _MAX_PADDING * sum(rows))

    def _has_room(self, requests: Sequence[Request]) -> bool:
        """Return whether requests can run beside those that run, or are prefilled."""
        admitted = (*requests, *(self._prefill.requests if self._prefill is not None else ()))
        if self.num_running + len(admitted) > self._max_num_seqs:
            return False
        if self._limits.cache_bytes is None or self._size is None:
            return True
        lengths = defaultdict[str, list[int]](list)
        for request in (*(request for rows in self.running.values() for request in rows.values()), *admitted):
            lengths[request.adapter].append(request.max_cached_tokens)
        return sum(map(self._size.batch_nbytes, lengths.values())) <= self._limits.cache_bytes

    # State -------------------------------------------------------------------------------------------------------
    def _leave_queue(self, names: Iterable[str]) -> None:
        gone = frozenset(names)
        self.waiting = deque(request for request in self.waiting if request.name not in gone)

    def _stop_running(self, names: set[str]) -> None:
        for adapter, rows in tuple(self.running.items()):
            for name in names & rows.keys():
                del rows[name]
            if not rows:
                del self.running[adapter]

    def _leave_prefill(self, names: set[str]) -> None:
        """Drop the prefill with the last of its requests; until then, a row that left stays in the computation."""
        if self._prefill is not None:
            self._prefill.left |= names
            if all(request.name in self._prefill.left for request in self._prefill.requests):
                self._prefill = None


class _Prefill:
    """Prompts side by side, of `width` columns: those computed, and the requests that have left meanwhile."""

    def __init__(self, requests: tuple[Request, ...], width: int) -> None:
        self.requests, self.left = requests, set[str]()
        self._width, self._num_computed = width, 0

    @property
    def is_whole(self) -> bool:
        """Whether all is computed in one pass, since the pixels of a prompt are."""
        return any(request.pixels for request in self.requests)

    @property
    def num_left(self) -> int:
        """The number of tokens to compute, padding included."""
        return (self._width - self._num_computed) * len(self.requests)

    def advance(self, num_tokens: int) -> PrefillChunk:
        """Return the next columns, about `num_tokens` in all rows."""
        start = self._num_computed
        self._num_computed = min(self._width, start + max(num_tokens // len(self.requests), 1))
        return PrefillChunk(self.requests, start, self._num_computed, not self.num_left)

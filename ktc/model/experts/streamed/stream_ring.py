"""The ring: memory of a device that frozen weights pass through, sent ahead of their use across layers.

In: visits, one per use of a source (the packed bytes of a layer, in pieces). Out: each piece on the device, for as long
as the visit holds it. The ring learns which visit follows which: after the same two visits the one of last time is
expected, so a training step's forward, backward and recomputation are all foreseen from their second time on. Pieces of
expected visits are sent as soon as there is room; those of a visit that does not come are dropped and counted.
Pieces are stored one behind the other and are freed in the order in which they were sent. A copy waits, on the device,
for the last reader of the bytes that it overwrites. Visits follow one another: a visit inside another one is refused.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from ktc.model.experts.host.page_lock import page_lock
from ktc.model.experts.host.stream_copies import Arrival, Copies, Mark, copies_to

_ALIGNMENT: Final = 256  # bytes between which pieces begin, as kernels read them
_numbers = itertools.count()  # of sources: identities of objects are used again


class NearBytes(Protocol):
    """Parts of a source's storage that the device has already."""

    def send(self, copies: Copies, piece: Tensor, target: Tensor, after: Sequence[Mark]) -> tuple[Arrival, int]:
        """Begin to copy a piece as `Copies.send`, its near parts within the device. Return the bytes of the others."""
        ...


class StreamSource:
    """Bytes in host memory that are sent piece by piece: `pieces` are uint8 views of `storage`, in order."""

    def __init__(self, storage: Tensor, pieces: Sequence[Tensor], owner: object) -> None:
        self.storage, self.pieces, self.number = storage, tuple(pieces), next(_numbers)
        self.sizes: Sequence[int] = [piece.nbytes for piece in pieces]
        self._owner = weakref.ref(owner)
        self._near: weakref.ref[NearBytes] | None = None

    def is_near(self, near: NearBytes | None) -> None:
        """Take what the device has from there, for as long as it lives."""
        self._near = None if near is None else weakref.ref(near)

    def send(self, number: int, copies: Copies, target: Tensor, after: Sequence[Mark]) -> tuple[Arrival, int]:
        """Begin to copy a piece to `target`, and return the bytes that come from host memory."""
        piece, near = self.pieces[number], None if self._near is None else self._near()
        if near is not None:
            return near.send(copies, piece, target, after)
        return copies.send(piece, target, after), piece.nbytes

    def lock(self) -> None:
        """Lock the pages of the storage until the owner is gone."""
        owner = self._owner()
        if owner is not None:
            page_lock(self.storage, owner)


Gather = Callable[[Sequence[int], Copies, Tensor, Sequence[Mark]], tuple[Arrival, int]]


class GatheredSource(StreamSource):
    """Experts of one call, in any order: each piece, of `size` bytes, begins with those of one of `groups`.

    `gather` begins to copy a group to the place of a piece, and returns the bytes that come from host memory.
    """

    def __init__(
        self, storage: Tensor, owner: object, groups: Sequence[Sequence[int]], size: int, gather: Gather
    ) -> None:  # fmt: skip
        super().__init__(storage, (), owner)
        self.sizes = [size] * len(groups)
        self._groups, self._gather = groups, gather

    def send(self, number: int, copies: Copies, target: Tensor, after: Sequence[Mark]) -> tuple[Arrival, int]:
        """See `StreamSource.send`."""
        return self._gather(self._groups[number], copies, target, after)


@dataclass(frozen=True, slots=True)
class _Visit:
    """A use of a source (by its number): forward in the order of its pieces, backward in reverse."""

    source: int
    reverse: bool


@dataclass(slots=True, eq=False)
class _Planned:
    """One time of a visit, under way or expected: the pieces that are still to be sent."""

    visit: _Visit
    numbers: deque[int]


@dataclass(slots=True, eq=False)
class _Sent:
    """A piece on the device or on its way. `read` is the mark of its last reader; `done` frees its bytes."""

    plan: _Planned
    number: int
    begin: int
    end: int
    arrival: Arrival
    read: Mark | None = None
    done: bool = False


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """The traffic to one device: bytes sent by the bus, bytes that no visit used, seconds of copies, and of waiting.

    `bus_speed` is that of the bus alone, in bytes per second, measured when the ring was made.
    """

    device: str
    sent: int
    dropped: int
    copying: float
    waiting: float
    bus_speed: float


class Ring:
    """`nbytes` of a device's memory. A visit waits for the end of another thread's."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        self._copies: Copies = copies_to(device)
        with torch.inference_mode(mode=False):  # for later visits with gradients
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._copies.keep(self._memory)
        self._head = 0
        self._held: deque[_Sent] = deque()  # in the order of their bytes
        self._ready: deque[_Sent] = deque()  # of them, those that no visit has taken
        self._current: _Planned | None = None  # the visit under way
        self._plans: deque[_Planned] = deque()  # it and those that are expected
        self._last: tuple[_Visit | None, _Visit | None] = (None, None)
        self._following: dict[tuple[_Visit | None, _Visit | None], _Visit] = {}
        self._foresees = True  # as the last visit was foreseen, the ring sends ahead
        self._sources: weakref.WeakValueDictionary[int, StreamSource] = weakref.WeakValueDictionary()
        self._marks: list[Mark] = []  # that the next copy waits for
        self._turn, self._visitor = threading.Lock(), 0
        self._sent = self._dropped = 0
        self._copying = self._waiting = self._bus_speed = 0.0
        self._unread: deque[Arrival] = deque()

    @contextmanager
    def visit(
        self, source: StreamSource, required: Collection[int], *, reverse: bool = False, foreseen: bool = True
    ) -> Generator[Callable[[int], Tensor]]:
        """Use the `required` pieces of a source, in their order or in reverse: a function returns one after the other.

        A piece is on the device until the next one is taken: what reads it must have been issued by then. One that is
        not `foreseen` has pieces of its call alone: until another one begins, nothing is sent ahead. Raises
        `ValueError` for a piece larger than the ring, `RuntimeError` inside of another visit.
        """
        if self._visitor == threading.get_ident():
            raise RuntimeError("a visit of a ring inside another one")
        with self._turn:
            self._foresees = foreseen
            plan = self._begin(source, _Visit(source.number, reverse), required)
            self._visitor = threading.get_ident()
            taken: list[_Sent] = []

            def take(number: int) -> Tensor:
                self._free(taken)
                taken.append(self._take(plan, number))
                return self._memory[taken[0].begin : taken[0].end]

            try:
                yield take
            finally:
                self._free(taken)
                self._leave()
                self._visitor = 0

    def forget(self) -> None:
        """Drop the pieces that were sent ahead, once they have arrived: their source is about to change."""
        with self._turn:
            self._copies.finish()
            while self._ready:
                self._give_up(self._ready.popleft())
            self._plans.clear()

    def figures(self) -> StreamFigures:
        """Return the sums since the ring was made. Waits for the device."""
        self._copies.finish()
        self._read_times()
        sums = (self._sent, self._dropped, self._copying, self._waiting)
        return StreamFigures(str(self.device), *sums, self._bus_speed)

    # Foresight

    def _begin(self, source: StreamSource, visit: _Visit, required: Collection[int]) -> _Planned:
        largest = max(source.sizes)
        if largest > self.nbytes:
            raise ValueError(f"a piece of {largest} bytes does not fit a ring of {self.nbytes} bytes")
        self._sources[visit.source] = source
        if self.device.type == "cuda":
            source.lock()
        if not self._bus_speed:
            self._bus_speed = self._copies.bus_speed(source.storage)
        if self._foresees:
            self._following[self._last] = visit
            self._last = self._last[1], visit
        if not self._plans or self._plans[0].visit != visit:
            while self._ready:
                self._give_up(self._ready.popleft())
            self._plans = deque([self._planned(source, visit)])
        self._current = plan = self._plans[0]
        plan.numbers = deque(number for number in plan.numbers if number in required)
        self._send()
        return plan

    def _planned(self, source: StreamSource, visit: _Visit) -> _Planned:
        numbers = range(len(source.sizes))
        return _Planned(visit, deque(reversed(numbers) if visit.reverse else numbers))

    def _look_ahead(self) -> _Planned | None:
        """Plan the visit that is expected after those that are planned, if one is known."""
        if not self._foresees:
            return None
        before = (*self._last, *(plan.visit for plan in self._plans if plan is not self._current))[-2:]
        following = self._following.get((before[0], before[1]))
        source = None if following is None else self._sources.get(following.source)
        if following is None or source is None or len(self._plans) > 2 * len(self._sources):
            return None
        self._plans.append(self._planned(source, following))
        return self._plans[-1]

    # Memory

    def _send(self) -> None:
        """Send as much as there is room for: the visit under way, then those that are expected."""
        while plan := next((plan for plan in self._plans if plan.numbers), None) or self._look_ahead():
            source = self._sources.get(plan.visit.source)
            if source is None:  # gone with its model
                plan.numbers.clear()
                continue
            begin = self._room(source.sizes[plan.numbers[0]])
            if begin is None:
                return
            self._send_to(begin, source, plan, plan.numbers.popleft())

    def _send_to(self, begin: int, source: StreamSource, plan: _Planned, number: int) -> None:
        end = begin + source.sizes[number]
        arrival, sent_bytes = source.send(number, self._copies, self._memory[begin:end], self._marks)
        self._marks = []
        sent = _Sent(plan, number, begin, end, arrival)
        self._head = -(-end // _ALIGNMENT) * _ALIGNMENT
        self._held.append(sent)
        self._ready.append(sent)
        self._unread.append(arrival)
        self._sent += sent_bytes

    def _room(self, size: int) -> int | None:
        """Return where `size` bytes are free, None if they are not. The next copy waits for the readers of them."""
        while (begin := self._gap(size)) is None:
            if not self._held[0].done:
                return None
            freed = self._held.popleft()
            if freed.read is not None:
                self._marks.append(freed.read)
        return begin

    def _gap(self, size: int) -> int | None:
        if not self._held:
            return 0
        first = self._held[0].begin
        if self._held[-1].begin >= first:
            if self._head + size <= self.nbytes:
                return self._head
            return 0 if size <= first else None
        return self._head if self._head + size <= first else None

    # A visit

    def _take(self, plan: _Planned, number: int) -> _Sent:
        """Return a piece of the visit under way. Pieces before it are not required."""
        while self._ready:
            sent = self._ready.popleft()
            if sent.plan is plan and sent.number == number:
                sent.arrival.wait()
                return sent
            self._give_up(sent)
            self._send()
        raise LookupError(f"piece {number} was not required, or was taken before")

    def _give_up(self, sent: _Sent) -> None:
        sent.done = True
        self._dropped += sent.end - sent.begin

    def _free(self, taken: list[_Sent]) -> None:
        """Free pieces after the work that the device has now, and send further ones."""
        for sent in taken:
            sent.read, sent.done = self._copies.mark(), True
        taken.clear()
        self._send()

    def _leave(self) -> None:
        """Drop the pieces that the visit did not take."""
        plan, self._current = self._plans.popleft(), None
        while self._ready and self._ready[0].plan is plan:
            self._give_up(self._ready.popleft())
        self._send()
        self._read_times()

    def _read_times(self) -> None:
        """Add the times of copies that are over."""
        while self._unread and self._unread[0].is_over():
            copying, waiting = self._unread.popleft().seconds()
            self._copying += copying
            self._waiting += waiting


_rings: Final[weakref.WeakValueDictionary[tuple[torch.device, int], Ring]] = weakref.WeakValueDictionary()


def ring_of(device: torch.device, nbytes: int) -> Ring:
    """Return the ring of this size on a device. It is freed with the last reference to it."""
    ring = _rings.get((device, nbytes))
    if ring is None:
        _rings[device, nbytes] = ring = Ring(device, nbytes)
    return ring


def rings() -> tuple[Ring, ...]:
    """Return the rings of this process."""
    return tuple(_rings.values())

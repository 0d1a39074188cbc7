"""The harness of measurements in turns: in every round each candidate runs once, after a measurement of the limits.

In: candidates by key. Out: their seconds by round, the samples of the limits, and the failures of peers. Nothing is
compared across runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

import torch

from ktc.tools.measure.limits import Limits, Samples

K = TypeVar("K")
FAILURES = (RuntimeError, ImportError, AttributeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Seconds:
    """The time that a piece of work took."""

    cpu: float
    wall: float

    def __truediv__(self, calls: int) -> Seconds:
        return Seconds(self.cpu / calls, self.wall / calls)


@dataclass(frozen=True, slots=True)
class Turns(Generic[K]):
    """The measurements: seconds by candidate and round, the limits, and why a peer was left out."""

    seconds: Mapping[K, list[Seconds]]
    samples: Samples = field(default_factory=Samples)
    failures: dict[K, str] = field(default_factory=dict[K, str])


def in_turns(
    candidates: Mapping[K, Callable[[int], Seconds]],
    rounds: int,
    limits: Limits,
    observe: Callable[[K], None],
    peers: Container[K] = (),
) -> Turns[K]:
    """Run each candidate with the round's number, 0 for one more round that loads, packs and is not counted.

    A failure of a candidate in `peers` leaves it out; others end the run.
    """
    turns: Turns[K] = Turns({key: [] for key in candidates})
    for number in range(rounds + 1):
        for key, run in candidates.items():
            if key in turns.failures:
                continue
            limits.measure(turns.samples)
            observe(key)
            try:
                spent = run(number)
            except FAILURES as error:
                if key not in peers:
                    raise
                turns.failures[key] = failure(error)
                continue
            if number > 0:
                turns.seconds[key].append(spent)
    return turns


def failure(error: Exception) -> str:
    """Return the first line of a peer's failure."""
    kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
    return f"it failed: {kind}{next(iter(str(error).splitlines()), 'without a word')}"


def clock_of(threads: int) -> Literal["cpu", "wall"]:
    """Return the clock of a figure: CPU time of one thread, wall time of more."""
    return "cpu" if threads == 1 else "wall"


def milliseconds(seconds: Sequence[Seconds], threads: int) -> dict[str, float]:
    """Return the fields `ms`, `best_ms`, `cpu_ms` and `wall_ms` of a row: medians, and the quickest round."""
    by_clock = {name: [getattr(spent, name) for spent in seconds] for name in ("cpu", "wall")}
    counted = by_clock[clock_of(threads)]
    return {
        "ms": 1e3 * statistics.median(counted),
        "best_ms": 1e3 * min(counted),
        "cpu_ms": 1e3 * statistics.median(by_clock["cpu"]),
        "wall_ms": 1e3 * statistics.median(by_clock["wall"]),
    }


@contextmanager
def measured() -> Generator[list[Seconds]]:
    """Yield a list that holds the time of the block after its end, by the clocks of this process."""
    spent: list[Seconds] = []
    cpu, wall = time.process_time(), time.perf_counter()
    yield spent
    spent.append(Seconds(time.process_time() - cpu, time.perf_counter() - wall))


@dataclass(slots=True)
class StepClock:
    """The seconds of consecutive steps. `finished` gets those so far."""

    finished: Callable[[Sequence[float]], None] = lambda seconds: None
    seconds: list[float] = field(default_factory=list[float])
    _last: float = 0.0

    def start(self) -> None:
        """Begin a step: the first, or one after a pause."""
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
        self._last = time.perf_counter()

    def step(self) -> None:
        """End a step when the GPUs have done its work, and begin the next."""
        began = self._last
        self.start()
        self._ended(began)

    def passed(self) -> None:
        """End a step whose result the host has, and begin the next, for which the GPUs may work already."""
        began, self._last = self._last, time.perf_counter()
        self._ended(began)

    def _ended(self, began: float) -> None:
        self.seconds.append(self._last - began)
        self.finished(self.seconds)

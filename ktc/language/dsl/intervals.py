"""Sets of layers as intervals, for conditions such as `m.layer >= 3 and m.layer not in [7, 9]`.

A module outside the layers has no layer number. `without_number` is the condition's value for it: true, false, or
`None` if undefined. Undefined counts as false but does not become true under `not`.
"""

from __future__ import annotations

from dataclasses import dataclass

LAST = 10**9  # stands for "no upper end": larger than any model's number of layers
Interval = tuple[int, int]  # both ends are inclusive


@dataclass(frozen=True, slots=True)
class Layers:
    """Disjoint intervals in order, and the value for a path without a layer."""

    intervals: tuple[Interval, ...]
    without_number: bool | None

    @property
    def empty(self) -> bool:
        return not self.intervals and not self.without_number

    def hold(self, layer: int) -> bool:
        return any(first <= layer <= last for first, last in self.intervals)

    def edges(self) -> set[int]:
        """Return the ends of the intervals and their neighbours."""
        ends = {end for interval in self.intervals for end in interval if end < LAST}
        return ends | {end + 1 for end in ends} | {max(end - 1, 0) for end in ends}

    def both(self, other: Layers) -> Layers:
        """`and`"""
        overlaps = [
            (max(first, low), min(last, high))
            for first, last in self.intervals
            for low, high in other.intervals
            if max(first, low) <= min(last, high)
        ]
        verdicts = (self.without_number, other.without_number)
        return Layers(tuple(overlaps), False if False in verdicts else None if None in verdicts else True)

    def either(self, other: Layers) -> Layers:
        """`or`"""
        return self.negated().both(other.negated()).negated()

    def negated(self) -> Layers:
        """`not`"""
        gaps: list[Interval] = []
        start = 0
        for first, last in self.intervals:
            if start < first:
                gaps.append((start, first - 1))
            start = last + 1
        if start <= LAST:
            gaps.append((start, LAST))
        return Layers(tuple(gaps), None if self.without_number is None else not self.without_number)


ANY_LAYER = Layers(((0, LAST),), True)
NO_LAYER = Layers((), False)


def between(first: float, last: float) -> Layers:
    """Return the layers from `first` to `last`, inclusive; undefined without a layer."""
    low, high = max(0, -int(-first // 1)), min(LAST, int(last // 1))
    return Layers(((low, high),) if low <= high else (), None)

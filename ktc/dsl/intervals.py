"""Sets of layers as intervals: what conditions such as `m.layer >= 3 and m.layer not in [7, 9]` select.

A module outside the layers has no number; `without_number` says what the condition is for it: true, false, or `None`
where it is undefined, which counts as false but does not become true under `not`.
"""

from __future__ import annotations

from dataclasses import dataclass

LAST = 10**9  # no model has a layer of that number; it stands for "no upper end"
Interval = tuple[int, int]  # both ends belong to it


@dataclass(frozen=True, slots=True)
class Layers:
    """Disjoint intervals in order, and the verdict for a path without a layer."""

    intervals: tuple[Interval, ...]
    without_number: bool | None

    @property
    def empty(self) -> bool:
        return not self.intervals and not self.without_number

    def hold(self, layer: int) -> bool:
        return any(first <= layer <= last for first, last in self.intervals)

    def edges(self) -> set[int]:
        """The ends of the intervals and their neighbours."""
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
    """The layers from `first` to `last`, the ends included; undefined without a layer."""
    low, high = max(0, -int(-first // 1)), min(LAST, int(last // 1))
    return Layers(((low, high),) if low <= high else (), None)

"""How many modules of each class a device holds, so that most time is gained: exact, by class counts.

Modules of one class are identical, so a solution is a count per class. Choosing them is a 0/1 knapsack, which is
NP-hard for arbitrary items. With few classes all counts can be tried, and the largest class fills what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import torch

_MOST_CASES: Final = 2_000_000


@dataclass(frozen=True, slots=True)
class ItemClass:
    """`count` identical modules: the bytes of one on the device, and the seconds that one saves there."""

    name: str
    count: int
    nbytes: int
    gain: float

    @property
    def density(self) -> float:
        """Seconds per byte."""
        return self.gain / max(1, self.nbytes)


@dataclass(frozen=True, slots=True)
class Counts:
    """How many of each class are on the device, and the seconds saved. `gap` bounds what a better solution saves."""

    counts: tuple[int, ...]
    gain: float
    gap: float = 0.0


def best_counts(classes: Sequence[ItemClass], capacity: int) -> Counts:
    """Return the counts with the largest gain within `capacity` bytes.

    Where too many combinations exist, the classes are taken by density, and `gap` is at most the gain of one item.
    """
    useful = [number for number, item in enumerate(classes) if item.gain > 0 and item.count]
    if not useful or capacity <= 0:
        return Counts((0,) * len(classes), 0.0)
    filling = max(useful, key=lambda number: classes[number].count)
    others = [number for number in useful if number != filling]
    if prod(classes[number].count + 1 for number in others) > _MOST_CASES:
        return by_density(classes, capacity)
    axes = [torch.arange(classes[number].count + 1) for number in others]
    pairs = [
        (axis.reshape([-1 if place == number else 1 for place in range(len(axes))]), classes[others[number]])
        for number, axis in enumerate(axes)
    ]
    left = capacity - sum((axis * item.nbytes for axis, item in pairs), start=torch.tensor(0))
    last = classes[filling]
    filled = (left.clamp(min=0) // max(1, last.nbytes)).clamp(max=last.count)
    gain = filled.double() * last.gain + sum(
        (axis.double() * item.gain for axis, item in pairs), start=torch.tensor(0.0)
    )
    gain = torch.where(left >= 0, gain, torch.tensor(-1.0, dtype=torch.double))
    place = int(gain.argmax())
    where = [int(index) for index in torch.unravel_index(torch.tensor(place), gain.shape)]
    best = {**dict(zip(others, where, strict=True)), filling: int(filled.reshape(-1)[place])}
    return Counts(tuple(best.get(number, 0) for number in range(len(classes))), float(gain.reshape(-1)[place]))


def by_density(classes: Sequence[ItemClass], capacity: int) -> Counts:
    """Return the counts by gain per byte, the best first: optimal but for one item (Dantzig, 1957)."""
    counts, left, gap = [0] * len(classes), capacity, 0.0
    for number in sorted(range(len(classes)), key=lambda number: -classes[number].density):
        item = classes[number]
        if item.gain <= 0:
            break
        counts[number] = min(item.count, left // max(1, item.nbytes))
        left -= counts[number] * item.nbytes
        if counts[number] < item.count:
            gap = gap or item.gain
    gain = sum(count * item.gain for count, item in zip(counts, classes, strict=True))
    return Counts(tuple(counts), gain, gap)

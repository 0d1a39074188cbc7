"""Which single experts a GPU keeps, of all layers of a model: pure functions of counted choices.

In: how often each expert was chosen, (layers, experts). Out: the experts to begin with, and exchanges between steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

DECAY: Final = 0.9  # of counts, each time that they are read
_RATIO: Final = 1.25  # that a newcomer's count exceeds the other's by, so that equal experts stay where they are
_MORE: Final = 2.0


@dataclass(frozen=True, slots=True)
class Exchange:
    """Expert `entering` takes the place of `leaving`: numbers of both in the flattened counts."""

    entering: int
    leaving: int


def first_kept(counts: Tensor, places: int) -> list[int]:
    """Return the experts to begin with, the most often chosen first: numbers in the flattened counts.

    Of equal ones, each layer has as many, those with the lowest numbers.
    """
    layers, experts = counts.shape
    by_number = counts.t().flatten()  # expert by expert
    order = torch.argsort(by_number, descending=True, stable=True)[:places]
    return [int(at) % layers * experts + int(at) // layers for at in order]


def exchanges(counts: Tensor, kept: Tensor, most: int) -> list[Exchange]:
    """Return up to `most` exchanges of kept experts for others that were chosen clearly more often.

    `kept` is boolean, shaped like the counts.
    """
    flat, is_kept = counts.flatten(), kept.flatten()
    leaving = _ordered(flat, is_kept)[:most]
    entering = _ordered(-flat, ~is_kept)[:most]
    pairs = zip(entering, leaving, strict=False)
    return [Exchange(new, old) for new, old in pairs if flat[new] > _RATIO * flat[old] + _MORE]


def _ordered(values: Tensor, among: Tensor) -> list[int]:
    """Return the numbers of some values in ascending order, equal ones by number."""
    numbers = among.nonzero().flatten()
    order = torch.argsort(values[numbers], stable=True)
    return [int(number) for number in numbers[order]]


def bus_share(bus: float, cpu: float) -> float:
    """Return the share of the experts not kept that a GPU reads over the bus, by the speeds of bus and CPU."""
    return bus / (bus + cpu) if bus > 0 else 0.0

"""Which single experts a GPU keeps, of all layers of a model: pure functions of counted choices.

In: how often each expert was chosen, (layers, experts). Out: the experts to begin with, and exchanges between steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor

from ktc.model.experts.kept.kept_division import CALL

DECAY: Final = 0.9  # of counts, each time that they are read
_DEVIATIONS: Final = 4.0  # of the difference of two counts, by which a newcomer exceeds the other
BESIDE: Final = 0.9  # of the bus's speed alone, beside the CPU's reads: 44 to 50 of 51 GB/s (an H100 and an H200)


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

    `kept` is boolean, shaped like the counts. More often is not by chance: of many experts that are chosen evenly, some
    have twice the count of others, and their exchange would take the bus from the steps.
    """
    flat, is_kept = counts.flatten(), kept.flatten()
    leaving = _first(flat, is_kept, most)
    entering = _first(-flat, ~is_kept, most)
    pairs = zip(entering, leaving, strict=False)
    return [Exchange(new, old) for new, old in pairs if _is_clearly_more(flat[new], flat[old])]


def _is_clearly_more(one: Tensor, other: Tensor) -> bool:
    return float(one - other) > _DEVIATIONS * math.sqrt(float(one + other))


def _first(values: Tensor, among: Tensor, most: int) -> list[int]:
    """Return the numbers of up to `most` of some values in ascending order, equal ones by number."""
    numbers = among.nonzero().flatten()
    order = torch.argsort(values[numbers], stable=True)[:most]
    return cast("list[int]", numbers[order].tolist())


def cpu_speed(nbytes: float, seconds: float, calls: int) -> float:
    """Return the speed at which the CPU reads experts, from the time of calls that have read some.

    `CALL` is no more than half of a call: it was measured on one machine.
    """
    return nbytes / max(seconds - CALL * calls, seconds / 2)


def next_share(share: float, bus: float, cpu: float) -> float:
    """Return the bus's share of the speed of bus and CPU, after another measurement: half of the way from `share`.

    `bus` is the speed of copies alone, 0 if the bus is not used, and `cpu` that of the CPU's reads in steps, beside it.
    """
    at_once = BESIDE * bus
    return (share + at_once / (at_once + cpu)) / 2 if bus > 0 else 0.0

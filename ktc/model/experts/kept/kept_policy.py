"""Which single experts a GPU keeps, of all layers of a model: pure functions of counted choices.

In: how often each expert was chosen, (layers, experts). Out: the experts to begin with, and exchanges between steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple, cast

import torch
from torch import Tensor

from ktc.model.experts.kept.kept_division import CALL

DECAY: Final = 0.9  # of counts, each time that they are read
_DEVIATIONS: Final = 4.0  # of the difference of two counts, by which a newcomer exceeds the other
_FADE: Final = 0.5  # of sums over calls, at each look at them
_IDLE: Final = 0.75  # the same without new calls
_PLANNED: Final = 4.0  # calls of each size that the plan counts as
_SLOWEST: Final = 30.0
_LEAST_SHARE: Final = 0.02
_LEAST_SLOPE: Final = 0.25  # of the plan's
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


class CpuLine(NamedTuple):
    """The time of a call of the CPU: `call` seconds, and `per_byte` seconds for each byte of experts that it reads."""

    call: float
    per_byte: float


class CallSums(NamedTuple):
    """Sums over calls: their number, bytes, seconds, bytes squared, and bytes times seconds. Later ones weigh more."""

    calls: float = 0.0
    nbytes: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def followed_by(self, new: CallSums) -> CallSums:
        """Return these sums with those of the last steps. Without new calls they fade too, but more slowly."""
        fade = _FADE if new.calls else _IDLE
        return CallSums(*(fade * old + more for old, more in zip(self, new, strict=True)))


def no_slower(sums: CallSums, plan: CpuLine) -> CallSums:
    """Return sums whose calls take at most `_SLOWEST` times as long as planned.

    First calls read weights from a disk, or wake threads that do not exist yet: one may take a second.
    """
    most = _SLOWEST * (sums.calls * plan.call + sums.nbytes * plan.per_byte)
    factor = min(1.0, most / sums.seconds) if sums.seconds > 0 else 1.0
    return sums._replace(seconds=factor * sums.seconds, products=factor * sums.products)


def planned_line(share: float, bus: float) -> CpuLine:
    """Return the line of a CPU beside which the bus, with copies of this speed alone, has this share."""
    known = min(max(share, _LEAST_SHARE), 1 - _LEAST_SHARE)
    return CpuLine(CALL, known / (1 - known) / (BESIDE * bus) if bus > 0 else 0.0)


def measured_line(sums: CallSums, plan: CpuLine, nbytes: float) -> CpuLine:
    """Return the line of least squares through measured calls and a few calls as planned, of 0 and `nbytes` bytes.

    A speed alone would not do. Calls that take longer than planned would count as slow reads, the more so the less they
    read, and a CPU that gets less for it would end with nothing. Where the CPU has read nothing for a while, the
    planned calls weigh more, so it gets something again, and a busy minute does not last.
    """
    for size in (0.0, nbytes):
        seconds = plan.call + size * plan.per_byte
        more = (1.0, size, seconds, size**2, size * seconds)
        sums = CallSums(*(value + _PLANNED * of_one for value, of_one in zip(sums, more, strict=True)))
    count, size, seconds = sums.calls, sums.nbytes / sums.calls, sums.seconds / sums.calls
    slope = (sums.products / count - size * seconds) / (sums.squares / count - size**2)
    per_byte = min(max(slope, plan.per_byte * _LEAST_SLOPE), seconds / size)
    return CpuLine(seconds - size * per_byte, per_byte)


def share_beside(line: CpuLine, bus: float) -> float:
    """Return the bus's share of the speed of bus and CPU; 0 if copies have no speed, since none are made."""
    return line.per_byte / (line.per_byte + 1 / (BESIDE * bus)) if bus > 0 else 0.0

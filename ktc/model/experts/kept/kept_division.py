"""How bus and CPU divide the experts of a call that the GPU does not keep: pure functions of numbers.

Of a call with more rows than a step, and fewer than one that is sent whole, the experts with the most rows go over the
bus. In: the rows of each expert, which of them the GPU keeps, and speeds. Out: the experts that are sent; the CPU
computes the others. For the split of a step (`kept_split.py`), `lead_of` says what a call costs the CPU. The planner
predicts with the same functions, for even choices.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

FEWEST: Final = 17  # tokens of a call that is divided: the steps of fewer read experts by address
CALL: Final = 27e-6  # seconds of a call on the CPU, besides reading experts: up to four of int4 on 15 threads of a Xeon
_MOST_LEAD: Final = 1024.0  # experts, more than a step of a layer misses


@dataclass(frozen=True, slots=True)
class Division:
    """Calls of at least `least` tokens are divided. The CPU's products take longer than its reads beyond `crowded` rows
    of an expert.
    """

    least: int
    crowded: float

    def cost(self, rows: float) -> float:
        """Return the time of an expert with these rows on the CPU, in that of one read."""
        return max(1.0, rows / self.crowded)


def over_bus(rows: Sequence[int], near: Collection[int], share: float, division: Division) -> tuple[int, ...]:
    """Return the experts that are sent, by number. `rows` has those of each expert, 0 for experts that none chose.

    `share` is that of the bus in the speed of bus and CPU. Of the experts that are not `near`, those with the most rows
    are sent, of equal ones those with the lowest numbers, until whichever of both ends last ends earliest.
    """
    far = [expert for expert, count in enumerate(rows) if count and expert not in near]
    far.sort(key=lambda expert: -rows[expert])
    rest = [share * division.cost(rows[expert]) for expert in far]  # of the CPU, in the unit in which the bus has
    left, best, sent = sum(rest), sum(rest), 0  # 1 - share for each
    for number, cost in enumerate(rest, 1):
        left -= cost
        ends = max(number * (1 - share), left)
        if ends < best:
            best, sent = ends, number
    return tuple(sorted(far[:sent]))


def even_over_bus(misses: float, rows: float, share: float, division: Division) -> float:
    """Return how many of `misses` experts with equally many rows are sent."""
    cost = share * division.cost(rows)
    return misses * cost / (1 - share + cost) if cost else 0.0


def lead_of(share: float, bus: float, nbytes: float, call: float = CALL) -> float:
    """Return by how many experts more the bus reads as many seconds as the CPU with a call, than by its share alone.

    Experts have `nbytes`, `bus` is the speed of copies beside the CPU, `call` the seconds of a call. With b and c the
    seconds of an expert there and on the CPU, s of m experts end with the others at s * b = call + (m - s) * c, and the
    share is c / (b + c).
    """
    return min(call * (1 - share) * bus / nbytes, _MOST_LEAD) if share > 0 else 0.0


def least_of(share: float, bus: float, nbytes: float, call: float = CALL) -> float:
    """Return how much of an expert the CPU reads at least, if anything: what the bus does in an eighth of a call.

    An error of the measured time of a call up to that costs nothing.
    """
    return min(call / 8 * bus / nbytes, _MOST_LEAD) if share > 0 else 0.0

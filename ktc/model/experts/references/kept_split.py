"""Which engine reads a chosen expert of a decoding step: memory of the GPU, the bus, or the CPU.

In: the choices of a layer, the addresses of the experts that the GPU keeps, and the share of the others that the GPU
reads over the bus. Out: an address for each choice that the GPU computes, and the choices that are left to the CPU.
At most one expert is on both engines: the GPU computes its first intermediate units, the CPU the others, and the
results are added as those of two experts are. The kernel of `kept_kernels.py` computes the same; this is its reference,
and it serves where no kernel runs.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ktc.model.experts.layouts.panel_codes import MOST_PARTS, Cuts

COMPUTED_ELSEWHERE: Final = -1
"""A choice that a partial call of a kernel leaves out (`ForwardArguments::partial`)."""
FIRST_UNIT_BIT: Final = 32
"""The bit from which on a choice of such a call has the first unit of its expert (`kFirstUnitBit`)."""
WHOLE_SHARE: Final = 1 << 16  # of the experts that the GPU does not keep


def split(
    index_TK: Tensor, table: Tensor, share: Tensor, counts: Tensor, traffic: Tensor, packed: tuple[int, int], cuts: Cuts
) -> tuple[Tensor, Tensor]:
    """Divide the chosen experts of a layer: `(T, K) int64 -> (T * K,) int64, (T, K) int64`.

    Of the chosen experts without an address in `table`, ordered by number, the first ones (see `over_bus`) have that of
    the host's packed bytes. Returned are the addresses of the choices, 0 for the CPU's, and the choices with
    `COMPUTED_ELSEWHERE` in the place of those that have an address. The address of a divided expert has the number of
    its first parts that the GPU computes in its lowest bits, and its choices the unit after them from
    `FIRST_UNIT_BIT` on. Numbers of missing experts stay invalid. `share` (3,) has the share, the lead and the least.
    See `kept_kernels.split` for the others.
    """
    host, nbytes = packed
    experts = torch.arange(len(table), device=table.device)
    is_of = index_TK.flatten()[:, None] == experts
    chosen = is_of.any(0)
    missing = chosen & (table == 0)
    misses, order = missing.sum(), missing.cumsum(0)
    parts = over_bus(misses, share, cuts.parts)
    whole, rest = parts // cuts.parts, parts % cuts.parts
    taken = torch.where(order <= whole, 0, torch.where(order == whole + 1, rest, 0))
    places = torch.where(missing & ((order <= whole) | (taken > 0)), host + experts * nbytes + taken, table)
    addresses = (is_of * places).sum(1)
    given = addresses.view_as(index_TK)
    wrong = torch.where((index_TK < 0) | (index_TK >= 1 << FIRST_UNIT_BIT), len(table), index_TK)
    later = index_TK + ((given % MOST_PARTS * cuts.step) << FIRST_UNIT_BIT)
    left = torch.where(given == 0, wrong, torch.where(given % MOST_PARTS > 0, later, COMPUTED_ELSEWHERE))
    counts += chosen.to(counts.dtype)
    sent, all_units = whole * cuts.units + rest * cuts.step, misses * cuts.units
    hits = (chosen.sum() - misses) * cuts.units
    traffic += torch.stack((hits, sent, all_units - sent))
    return addresses, left


def over_bus(misses: Tensor, share: Tensor, parts: int = 1) -> Tensor:
    """Return how many parts of some experts the bus reads, by its share (of `WHOLE_SHARE`) of the speed of bus and CPU.

    An expert has `parts` parts. `share` (3,) has two more numbers in `WHOLE_SHARE` of an expert. The lead is what the
    bus reads by the time in which a call of the CPU reads nothing: see `kept_division.lead_of`. So few experts are the
    bus' alone where a call costs the CPU more than they do. The CPU reads nothing where it would read less than the
    least (`kept_division.least_of`).

    Whichever of both ends last ends earliest with this number. The nearest one to the share would give a slow bus one
    whole expert too many: three of six at 0.42, which take it a sixth longer than four take the CPU.
    """
    most = misses * parts
    sent = torch.minimum((most + 1) * share[0] + share[1] * parts >> 16, most)
    return torch.where((most - sent) * WHOLE_SHARE < share[2] * parts, most, sent)

"""Which engine reads a chosen expert of a decoding step: memory of the GPU, the bus, or the CPU.

In: the choices of a layer, the addresses of the experts that the GPU keeps, and the share of the others that the GPU
reads over the bus. Out: an address for each choice that the GPU computes, and the choices that are left to the CPU.
The kernel of `kept_kernels.py` computes the same; this is its reference, and it serves where no kernel runs.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

COMPUTED_ELSEWHERE: Final = -1
"""A choice that a partial call of a kernel leaves out (`ForwardArguments::partial`)."""
WHOLE_SHARE: Final = 1 << 16  # of the experts that the GPU does not keep


def split(
    index_TK: Tensor, table: Tensor, share: Tensor, counts: Tensor, traffic: Tensor, host: int, nbytes: int
) -> tuple[Tensor, Tensor]:
    """Divide the chosen experts of a layer: `(T, K) int64 -> (T * K,) int64, (T, K) int64`.

    Of the chosen experts without an address in `table`, ordered by number, the first ones (see `over_bus`) have that of
    the host's packed bytes. Returned are the addresses of the choices, 0 for the CPU's, and the
    choices with `COMPUTED_ELSEWHERE` in the place of those that have an address. Numbers of
    missing experts stay invalid. `share` (2,) has the share and the lead. See `kept_kernels.split` for the others.
    """
    experts = torch.arange(len(table), device=table.device)
    is_of = index_TK.flatten()[:, None] == experts
    chosen = is_of.any(0)
    missing = chosen & (table == 0)
    misses = missing.sum()
    first = over_bus(misses, share[0], share[1])
    sent = missing & (missing.cumsum(0) <= first)
    places = torch.where(sent, host + experts * nbytes, table)
    addresses = (is_of * places).sum(1)
    wrong = torch.where(index_TK < 0, len(table), index_TK)
    left = torch.where((addresses != 0).view_as(index_TK), COMPUTED_ELSEWHERE, wrong)
    counts += chosen.to(counts.dtype)
    traffic += torch.stack((chosen.sum() - misses, first, misses - first, (misses > first).to(misses.dtype)))
    return addresses, left


def over_bus(misses: Tensor, share: Tensor, lead: Tensor) -> Tensor:
    """Return how many of some experts the bus reads, by its share (of `WHOLE_SHARE`) of the speed of bus and CPU.

    `lead` (in `WHOLE_SHARE` of an expert) is what the bus reads by the time in which a call of the CPU reads nothing:
    see `kept_division.lead_of`. So few experts are the bus' alone where a call costs the CPU more than they do.

    Whichever of both ends last ends earliest with this number. The nearest one to the share would give a slow bus one
    expert too many: three of six at 0.42, which take it a sixth longer than four take the CPU.
    """
    return torch.minimum((misses + 1) * share + lead >> 16, misses)

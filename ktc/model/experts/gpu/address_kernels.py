"""Where the experts of choices are: addresses, or numbers with a table of addresses. A part of Triton's kernels.

Experts begin at multiples of 16 bytes (`MOST_PARTS`). The lowest bits of an address have the number of first parts of
the expert that are computed from there (`kept_split.py`), or 0 for all of it.

Importing this needs Triton.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportReturnType=false
# The arguments of device code get their types from Triton, which is not typed itself.

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ktc.model.experts.layouts.panel_codes import MOST_PARTS

NO_BIAS: Final = -1
PARTS: Final = tl.constexpr(MOST_PARTS - 1)  # the bits of an address that have a number of parts
Side = Literal["rows", "columns"]
"""Of a matrix, that is as long as an expert's intermediate size: rows of gate and up, columns of down."""


class Places(NamedTuple):
    """`experts` (P,) int64 are addresses, 0 for none; with a `table` (E,) int64 of addresses they are its numbers.

    A part of an expert has `step` of its intermediate units; 0: all addresses are of whole experts.
    """

    experts: Tensor
    table: Tensor | None = None
    step: int = 0

    @property
    def given(self) -> tuple[Tensor, Tensor, int]:
        """The arguments of a kernel."""
        table = self.experts if self.table is None else self.table
        return self.experts, table, len(table)

    def cut(self, side: Side) -> Side | None:
        """Return the side on which a kernel leaves out what is not computed; None where all experts are whole."""
        return side if self.step else None


@triton.jit
def address_of(experts, table, pair, count, TABLE: tl.constexpr):
    """Return the address of a choice's expert.

    A number beyond the experts has an address without memory, so that reading it is an error of the GPU.
    """
    expert = tl.load(experts + pair)
    if TABLE:
        return tl.load(table + expert, mask=(expert >= 0) & (expert < count), other=1)
    else:
        return expert


@triton.jit
def beginning_of(place):
    """Return where the expert at an address begins, whole or not."""
    return place & ~PARTS


@triton.jit
def units_of(place, units, step):
    """Return how many of an expert's units are computed from an address: without a number of parts, that is all."""
    parts = (place & PARTS).to(tl.int32)
    return tl.minimum(units, (((parts - 1) & PARTS) + 1) * step)  # 0 counts as `MOST_PARTS`

"""Where the experts of choices are: addresses, or numbers with a table of addresses. A part of Triton's kernels.

Importing this needs Triton.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportReturnType=false
# The arguments of device code get their types from Triton, which is not typed itself.

from __future__ import annotations

from typing import Final, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

NO_BIAS: Final = -1


class Places(NamedTuple):
    """`experts` (P,) int64 are addresses, 0 for none; with a `table` (E,) int64 of addresses they are its numbers."""

    experts: Tensor
    table: Tensor | None = None

    @property
    def given(self) -> tuple[Tensor, Tensor, int]:
        """The arguments of a kernel."""
        table = self.experts if self.table is None else self.table
        return self.experts, table, len(table)


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

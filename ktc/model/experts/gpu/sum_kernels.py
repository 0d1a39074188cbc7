"""The sums of the rows of each token by Triton: each row is read once, each sum written once.

In: the rows of slots, and where a token's rows are. Out: what `slots.sum_rows` returns, added in the order of the
token's choices: results are equal to the bit from run to run. Importing this needs Triton.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportReturnType=false
# The arguments of device code get their types from Triton, which is not typed itself.

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS: Final = 2048  # of a token that a program adds at most


def summed(rows: Tensor, places: Tensor, weights: Tensor | None, first: int, dtype: torch.dtype) -> Tensor:
    """Return the sums of the rows of each token: `(S, H), (T, K) -> (T, H)`, of those at `places - first`.

    Rows are multiplied by weights (T, K) in fp32. Places outside of the rows count as zero.
    """
    (tokens, choices), columns = places.shape, rows.shape[1]
    out = rows.new_empty(tokens, columns, dtype=dtype)
    block = min(COLUMNS, triton.next_power_of_2(columns))
    if tokens:
        with torch.cuda.device_of(rows):  # Triton launches on the current device
            _summed[(tokens, triton.cdiv(columns, block))](
                rows, places.contiguous(), rows if weights is None else weights.contiguous(), out, len(rows), first,
                columns, CHOICES=choices, WEIGHTED=weights is not None, BLOCK=block, num_warps=4,
            )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["count", "first"])
def _summed(
    rows, places, weights, out, count, first, columns,
    CHOICES: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOICES):
        place = tl.load(places + token * CHOICES + choice) - first
        inside = (place >= 0) & (place < count)
        value = tl.load(rows + place * columns + column, mask=inside & (column < columns), other=0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + token * CHOICES + choice).to(tl.float32)
        total += value
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=column < columns)

"""The cross entropies of rows of logits with their gradient by Triton: rows are read twice and written once.

In: logits of tokens, their labels. Out: what `frozen_head.losses_with_gradient` computes. A program has a row: it sums
the exponentials in one pass, beside a running maximum, and writes the gradient in place in the next one, from the end,
which a GPU's cache then has. Importing this needs Triton.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportReturnType=false
# The arguments of device code get their types from Triton, which is not typed itself.

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOWEST: Final = tl.constexpr(-3.0e38)  # finite: the difference of two infinities is NaN


class Tile(NamedTuple):
    """The columns that a program has at once, and its warps."""

    columns: int
    warps: int


TILE: Final = Tile(8192, 8)


def losses_with_gradient(
    logits_RV: Tensor, labels_R: Tensor, losses_R: Tensor, ignore_index: int, *, tile: Tile = TILE
) -> None:
    """Write the cross entropies to `losses_R` (R,), fp32. The logits become their gradient, rounded once.

    A row whose label is `ignore_index` has the loss 0 and no gradient; one whose label does not exist has NaN in both.
    """
    rows, columns = logits_RV.shape
    assert logits_RV.is_contiguous() and losses_R.is_contiguous(), "a row behind the other"
    if rows:
        block = min(tile.columns, triton.next_power_of_2(columns))
        with torch.cuda.device_of(logits_RV):  # Triton launches on the current device
            _losses[(rows,)](
                logits_RV, labels_R.contiguous(), losses_R, columns, ignore_index, BLOCK=block, num_warps=tile.warps
            )


@triton.jit(do_not_specialize=["ignored"])
def _losses(logits, labels, losses, columns, ignored, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    of_row, label = logits + row * columns, tl.load(labels + row)
    counts = label != ignored
    exists = (label >= 0) & (label < columns)
    at_label = tl.load(of_row + label, mask=counts & exists, other=0).to(tl.float32)
    at_label = tl.where(exists, at_label, float("nan"))
    blocks = tl.cdiv(columns, BLOCK)
    highest, total = tl.full((), _LOWEST, tl.float32), tl.full((), 0.0, tl.float32)
    for block in range(blocks):
        column = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(of_row + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(x, 0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher), 0)
        highest = higher
    tl.store(losses + row, tl.where(counts, tl.log(total) - (at_label - highest), 0.0))
    factor = tl.where(counts, tl.where(exists, 1 / total, float("nan")), 0.0)
    for block in range(blocks):
        column = (blocks - 1 - block) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(of_row + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(x - highest) * factor
        gradient = tl.where(counts & (column == label), gradient - 1, gradient)
        tl.store(of_row + column, gradient.to(logits.dtype.element_ty), mask=column < columns)

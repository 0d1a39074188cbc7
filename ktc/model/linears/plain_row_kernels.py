"""Few rows times the plain weights of linear layers, several layers of one input at once, by Triton.

In: rows and up to three weights of one dtype. Out: their products with the biases, side by side, summed in fp32 and
rounded once. A program has a few outputs of one layer. Sums have one order, whether a layer is alone or not. Importing
this needs Triton.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportReturnType=false
# The arguments of device code get their types from Triton, which is not typed itself.

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST: Final = 3
"""Weights of a call."""
# On an H200 a row times 4,096 and twice 512 outputs of 2,880 columns takes 10.1 us, three calls of cuBLAS 23. Times
# 2,880 outputs of 4,096 columns it takes 8.1 and 11.8, times 32 of 2,880 columns 2.2 and 6.1.
_TILE: Final = {"ROWS": 2, "BLOCK": 1024, "num_warps": 4}


def rows_times(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """Multiply rows with the transposes of weights: `(S, K), (N, K) each -> (S, sum of N)`."""
    assert 0 < len(weights) <= MOST and x.is_contiguous(), "whole rows"
    sizes = [len(weight) for weight in weights] + [0] * (MOST - len(weights))
    programs = [triton.cdiv(size, _TILE["ROWS"]) for size in sizes]
    out = x.new_empty(len(x), sum(sizes))
    padded = [*weights, *[weights[0]] * (MOST - len(weights))]
    given = [*biases, *[None] * (MOST - len(weights))]
    if len(x):
        with torch.cuda.device_of(x):  # Triton launches on the current device
            _rows_times[(sum(programs), len(x))](
                x, *padded, *(out if bias is None else bias for bias in given), out, *programs[:2], *sizes,
                x.shape[1], out.shape[1], WEIGHTS=len(weights), FIRST_BIASED=given[0] is not None,
                SECOND_BIASED=given[1] is not None, THIRD_BIASED=given[2] is not None, **_TILE,
            )  # fmt: skip
    return out


@triton.jit
def _weight(
    x, weight, bias, out, program, rows, columns, BIASED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = program * ROWS + tl.arange(0, ROWS)
    of_row = weight + row.to(tl.int64)[:, None] * columns
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        value = tl.load(x + column, mask=column < columns, other=0).to(tl.float32)
        there = (row < rows)[:, None] & (column < columns)[None, :]
        sums += tl.load(of_row + column[None, :], mask=there, other=0).to(tl.float32) * value[None, :]
    total = tl.sum(sums, 1)
    if BIASED:
        total += tl.load(bias + row, mask=row < rows, other=0).to(tl.float32)
    tl.store(out + row, total.to(out.dtype.element_ty), mask=row < rows)


@triton.jit
def _rows_times(
    x, weight0, weight1, weight2, bias0, bias1, bias2, out, programs0, programs1, rows0, rows1, rows2, columns, width,
    WEIGHTS: tl.constexpr, FIRST_BIASED: tl.constexpr, SECOND_BIASED: tl.constexpr, THIRD_BIASED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, slot = tl.program_id(0), tl.program_id(1).to(tl.int64)
    x += slot * columns
    out += slot * width
    if WEIGHTS > 2 and program >= programs0 + programs1:
        further = program - programs0 - programs1
        _weight(x, weight2, bias2, out + rows0 + rows1, further, rows2, columns, THIRD_BIASED, ROWS, BLOCK)
    elif WEIGHTS > 1 and program >= programs0:
        _weight(x, weight1, bias1, out + rows0, program - programs0, rows1, columns, SECOND_BIASED, ROWS, BLOCK)
    else:
        _weight(x, weight0, bias0, out, program, rows0, columns, FIRST_BIASED, ROWS, BLOCK)

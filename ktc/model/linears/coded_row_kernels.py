"""Few rows times a linear layer's weight as it is stored, by Triton: a program multiplies a row with a panel.

In: rows, and a matrix of codes. Out: their products with the bias, summed in fp32 and rounded once, in one order.
Importing this needs Triton.
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

from ktc.model.experts.coded_kernels import SCALE_DTYPES, constants_of, panel_sums
from ktc.model.experts.coded_matrices import CodedMatrices

# Blocks of columns in a step of a program, and its warps. Few panels leave most of a GPU idle, so that each program
# has more loads on their way at once.
_MANY_PANELS: Final = 512
_FEW: Final = {"BLOCKS": 16, "num_warps": 8}
_MANY: Final = {"BLOCKS": 8, "num_warps": 4}


def rows_times(x: Tensor, matrix: CodedMatrices, bias: Tensor | None) -> Tensor:
    """Multiply rows with the transpose of a matrix: `(S, K), (1, N, K), (N,) -> (S, N)`."""
    packed, codes = matrix.packed, matrix.codes
    out = x.new_empty(len(x), matrix.rows)
    if len(x):
        sizes = _MANY if matrix.num_panels > _MANY_PANELS else _FEW
        with torch.cuda.device_of(packed):  # Triton launches on the current device
            _rows_times[(matrix.num_panels, len(x))](
                x, out if bias is None else bias, out,
                packed.view(torch.uint8 if codes.bits == 8 else torch.int16), packed.view(SCALE_DTYPES[codes.scales]),
                packed, matrix.panel_bytes, matrix.rows, matrix.columns,
                **constants_of(codes), BIASED=bias is not None, WIDE=codes.bits == 8, **sizes,
            )  # fmt: skip
    return out


@triton.jit
def _stored(out, bias, sums, row, rows, BIASED: tl.constexpr):
    if BIASED:
        sums += tl.load(bias + row, mask=row < rows, other=0).to(tl.float32)
    tl.store(out + row, sums.to(out.dtype.element_ty), mask=row < rows)


@triton.jit
def _rows_times(
    x, bias, out, codes, scales, factors, panel_bytes, rows, columns,
    NUMBERS: tl.constexpr, SCALES: tl.constexpr, LEAST: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    HEAD: tl.constexpr, NBYTES: tl.constexpr, SCALE: tl.constexpr, BIASED: tl.constexpr, WIDE: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    panel, slot = tl.program_id(0), tl.program_id(1)
    lower, upper = panel_sums(
        x + slot.to(tl.int64) * columns, codes, scales, factors, panel.to(tl.int64) * panel_bytes, columns,
        NUMBERS, SCALES, LEAST, GROUP, SPAN, NEIGHBOURS, HEAD, NBYTES, SCALE, BLOCKS,
    )  # fmt: skip
    result, first = out + slot.to(tl.int64) * rows, panel * 32
    if WIDE:
        _stored(result, bias, lower, first + tl.arange(0, 32), rows, BIASED)
    else:
        _stored(result, bias, lower, first + tl.arange(0, 16), rows, BIASED)
        _stored(result, bias, upper, first + 16 + tl.arange(0, 16), rows, BIASED)

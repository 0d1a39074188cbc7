"""Few rows times a linear layer's weight as it is stored, by Triton: a program multiplies a row with a panel.

In: rows, and a matrix of codes. Out: their products with the bias, summed in fp32 and rounded once, in one order.
Importing this needs Triton.
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

from ktc.model.experts.gpu.code_kernels import number_of, scale_of
from ktc.model.experts.gpu.coded_kernels import SCALE_DTYPES, constants_of, panel_sums
from ktc.model.experts.layouts.coded_matrices import CodedMatrices
from ktc.model.experts.layouts.panels import WIDTH
from ktc.model.kernels.triton_support import has_gluon

_MANY_PANELS: Final = 512
# Outputs of a program, blocks of columns in a step, and warps. Few panels leave most of a GPU idle, so that a program
# has more columns at once. With fewer outputs of codes of a byte, a panel is several programs.
_FEW: Final = {"LANES": 32, "BLOCKS": 16, "num_warps": 8}
_MANY: Final = {"LANES": 32, "BLOCKS": 8, "num_warps": 4}


def rows_times(x: Tensor, matrix: CodedMatrices, bias: Tensor | None) -> Tensor:
    """Multiply rows with the transpose of a matrix: `(S, K), (1, N, K), (N,) -> (S, N)`."""
    if (joined := _by_bytes(x, [matrix], [bias])) is not None:
        return joined
    packed, codes = matrix.packed, matrix.codes
    out = x.new_empty(len(x), matrix.rows)
    if len(x):
        sizes, wide = _MANY if matrix.num_panels > _MANY_PANELS else _FEW, codes.bits == 8
        given = x, out if bias is None else bias, out, packed.view(torch.uint8 if wide else torch.int16)
        bytes_of = packed.view(SCALE_DTYPES[codes.scales]), packed, matrix.panel_bytes, matrix.rows, matrix.columns
        parts = WIDTH // sizes["LANES"] if wide and not codes.least else 1
        with torch.cuda.device_of(packed):  # Triton launches on the current device
            _rows_times[(matrix.num_panels * parts, len(x))](
                *given, *bytes_of, **constants_of(codes), BIASED=bias is not None, WIDE=wide, PARTS=parts, **sizes
            )
    return out


def rows_times_each(x: Tensor, matrices: Sequence[CodedMatrices], biases: Sequence[Tensor | None]) -> Tensor:
    """Multiply rows with several matrices, side by side: `(S, K), (1, N, K) each -> (S, sum of N)`."""
    if (joined := _by_bytes(x, matrices, biases)) is not None:
        return joined
    return torch.cat([rows_times(x, *of_one) for of_one in zip(matrices, biases, strict=True)], 1)


def _by_bytes(x: Tensor, matrices: Sequence[CodedMatrices], biases: Sequence[Tensor | None]) -> Tensor | None:
    """Return the products by one call of the kernel in Gluon, None where it does not serve. Their sums have one size.

    So a layer has the same bits, whether it is alone or not.
    """
    if not has_gluon():
        return None
    from ktc.model.linears import byte_row_kernels

    serves = byte_row_kernels.serves(x, matrices) and len(set(map(byte_row_kernels.sizes_of, matrices))) == 1
    return byte_row_kernels.rows_times(x, matrices, biases) if serves else None


@triton.jit
def _stored(out, bias, sums, row, rows, BIASED: tl.constexpr):
    if BIASED:
        sums += tl.load(bias + row, mask=row < rows, other=0).to(tl.float32)
    tl.store(out + row, sums.to(out.dtype.element_ty), mask=row < rows)


@triton.jit
def _lane_sums(
    row, codes, scales, at, columns, lane,
    NUMBERS: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, NEIGHBOURS: tl.constexpr,
    HEAD: tl.constexpr, NBYTES: tl.constexpr, SCALE: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return the products of a row with some outputs of a panel whose codes are bytes (`panel_sums`)."""
    lines: tl.constexpr = 32 // NEIGHBOURS
    line, beside = tl.arange(0, lines), tl.arange(0, NEIGHBOURS)
    in_block = (line[:, None, None] * 32 + lane[None, :, None]) * NEIGHBOURS + beside[None, None, :]
    total = tl.full((BLOCKS, lines, LANES), 0, tl.float32)
    for first_block in range(0, columns, BLOCKS * 32):
        column = first_block + tl.arange(0, BLOCKS) * 32
        there = column < columns
        span, in_span = at + column // SPAN * NBYTES, column % SPAN
        place = (span + in_span // GROUP * (32 * SCALE)) // SCALE
        scale, _ = scale_of(scales, place[:, None] + lane[None, :], there[:, None], SCALES)
        from_column = (column[:, None] + line[None, :] * NEIGHBOURS)[:, :, None] + beside[None, None, :]
        x = tl.load(row + from_column, mask=from_column < columns, other=0).to(tl.float32)
        words = (span + HEAD + in_span * 32)[:, None, None, None] + in_block[None, :, :, :]
        code = tl.load(codes + words, mask=there[:, None, None, None], other=0).to(tl.int32)
        total += tl.sum(number_of(code, NUMBERS) * x[:, :, None, :], 3) * scale[:, None, :]
    return tl.sum(tl.sum(total, 1), 0)


@triton.jit
def _rows_times(
    x, bias, out, codes, scales, factors, panel_bytes, rows, columns,
    NUMBERS: tl.constexpr, SCALES: tl.constexpr, LEAST: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    HEAD: tl.constexpr, NBYTES: tl.constexpr, SCALE: tl.constexpr, BIASED: tl.constexpr, WIDE: tl.constexpr,
    PARTS: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    panel, slot = tl.program_id(0) // PARTS, tl.program_id(1)
    row, at = x + slot.to(tl.int64) * columns, panel.to(tl.int64) * panel_bytes
    result, first = out + slot.to(tl.int64) * rows, panel * 32
    if PARTS > 1:
        lane = tl.program_id(0) % PARTS * LANES + tl.arange(0, LANES)
        sums = _lane_sums(
            row, codes, scales, at, columns, lane,
            NUMBERS, SCALES, GROUP, SPAN, NEIGHBOURS, HEAD, NBYTES, SCALE, LANES, BLOCKS,
        )  # fmt: skip
        _stored(result, bias, sums, first + lane, rows, BIASED)
    else:
        lower, upper = panel_sums(
            row, codes, scales, factors, at, columns,
            NUMBERS, SCALES, LEAST, GROUP, SPAN, NEIGHBOURS, HEAD, NBYTES, SCALE, BLOCKS,
        )  # fmt: skip
        if WIDE:
            _stored(result, bias, lower, first + tl.arange(0, 32), rows, BIASED)
        else:
            _stored(result, bias, lower, first + tl.arange(0, 16), rows, BIASED)
            _stored(result, bias, upper, first + 16 + tl.arange(0, 16), rows, BIASED)

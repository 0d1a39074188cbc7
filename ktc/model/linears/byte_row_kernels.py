"""Few rows times linear layers in Q8_0, several of one input at once: Gluon of Triton, whose layouts are explicit.

In: rows in bf16 and up to three matrices of codes. Out: their products with the biases, side by side, summed in fp32
and rounded once. A program has 16 outputs of a panel; its warps share the blocks of 32 columns. Each thread reads 16
bytes at once: two columns of eight outputs. Sums have one order, whether a matrix is alone or not.
Triton's interpreter has no Gluon. Importing this needs Triton.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportReturnType=false, reportAssignmentType=false, reportIndexIssue=false
# The arguments of device code get their types from Triton, which is not typed itself.

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ktc.model.experts.layouts.coded_matrices import CodedMatrices
from ktc.model.experts.layouts.panels import WIDTH
from ktc.model.linears.plain_row_kernels import MOST

# Warps of a program, and blocks that each reads before it multiplies, by the most panels of a matrix: its sums have the
# same order in any call. On an H200 160 panels of 2,880 columns take 9 to 10 us, 90 of 4,096 columns 8.4, and 6,284 of
# 2,880 columns 184.
_SIZES: Final = ((128, 16, 4), (512, 8, 4), (None, 4, 4))
_SIGNS: Final = gl.constexpr(-2139062144)  # 0x80808080: of four codes


def sizes_of(matrix: CodedMatrices) -> tuple[int, int]:
    """Return the warps and blocks of a matrix. A call has those of one size."""
    panels = matrix.num_panels
    return next((warps, blocks) for most, warps, blocks in _SIZES if most is None or panels <= most)


def serves(rows: Tensor, matrices: Sequence[CodedMatrices]) -> bool:
    """Return whether the kernel multiplies these rows with these matrices."""
    if triton.knobs.runtime.interpret or not rows.is_cuda or torch.version.cuda is None:
        return False
    known = all((one.codes.numbers, one.codes.scales, one.codes.span) == ("int8", "fp16", WIDTH) for one in matrices)
    columns = {one.columns for one in matrices}
    return known and len(columns) == 1 and rows.shape[1] % WIDTH == 0 and rows.data_ptr() % 4 == 0


def rows_times(x: Tensor, matrices: Sequence[CodedMatrices], biases: Sequence[Tensor | None]) -> Tensor:
    """Multiply rows with the transposes of matrices: `(S, K), (1, N, K) each -> (S, sum of N)`."""
    assert 0 < len(matrices) <= MOST and x.is_contiguous(), "whole rows"
    warps, blocks = sizes_of(matrices[0])
    assert all(sizes_of(one) == (warps, blocks) for one in matrices), "matrices of one size"
    out = x.new_empty(len(x), sum(one.rows for one in matrices))
    padded = [*matrices, *[matrices[0]] * (MOST - len(matrices))]
    codes = [one.packed.view(torch.int32) for one in padded]
    given = [*biases, *[None] * (MOST - len(matrices))]
    panels = sum(one.num_panels for one in matrices)
    if len(x):
        with torch.cuda.device_of(x):  # Triton launches on the current device
            _rows_times[(2 * panels, len(x))](
                x.view(torch.int32), *codes, *(out if bias is None else bias for bias in given), out,
                padded[0].num_panels, padded[1].num_panels, *(one.rows for one in padded), x.shape[1], out.shape[1],
                MATRICES=len(matrices), FIRST_BIASED=given[0] is not None, SECOND_BIASED=given[1] is not None,
                THIRD_BIASED=given[2] is not None, WARPS=warps, BLOCKS=blocks, num_warps=warps,
            )  # fmt: skip
    return out


# Device code ---------------------------------------------------------------------------------------------------------
@gluon.jit
def _number(word, SHIFT: gl.constexpr):
    """Return a code of a word whose signs are changed, in fp32: from the bits of 2^23 + 128 + code."""
    return ((word >> SHIFT & 255) | 0x4B000000).to(gl.float32, bitcast=True) - 8388736.0


@gluon.jit
def _half(word, SHIFT: gl.constexpr):
    """Return a number of fp16 in a word, in fp32."""
    return (word >> SHIFT).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def _panel_sums(row, words, at, blocks, half, WARPS: gl.constexpr, BLOCKS: gl.constexpr):
    """Return the products of a row with eight even outputs of half a panel, and with the odd ones."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    thread = gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, layout))
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, layout))[None, :]
    warp, line, begin = thread // 32, thread % 32 // 2, at + half * 2 + thread % 2  # in units of 16 bytes
    even = gl.full([32 * WARPS, 4], 0, gl.float32, layout=layout)
    odd = even
    for first in range(0, blocks, WARPS * BLOCKS):
        for further in gl.static_range(BLOCKS):
            block = first + further * WARPS + warp
            there = block < blocks
            unit = begin + block * 68  # four of scales and 64 of codes
            scales = gl.load(words + ((unit * 4)[:, None] + four), mask=there[:, None], other=0)
            code = gl.load(words + (((unit + 4 + line * 4) * 4)[:, None] + four), mask=there[:, None], other=0) ^ _SIGNS
            two = gl.load(row + (block * 16 + line), mask=there, other=0)
            x0 = (two << 16).to(gl.float32, bitcast=True)[:, None]
            x1 = (two & -65536).to(gl.float32, bitcast=True)[:, None]
            even += (_number(code, 0) * x0 + _number(code, 8) * x1) * _half(scales, 0)
            odd += (_number(code, 16) * x0 + _number(code, 24) * x1) * _half(scales, 16)
    return _of_lanes(even, WARPS), _of_lanes(odd, WARPS)


@gluon.jit
def _of_lanes(sums, WARPS: gl.constexpr):
    """Add the sums of all lines: (threads, 4) -> (8,), a thread for each."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.convert_layout(gl.sum(gl.reshape(sums, [WARPS * 16, 8]), 0), layout)


@gluon.jit
def _stored(out, bias, sums, row, rows, BIASED: gl.constexpr):
    if BIASED:
        sums += gl.load(bias + row, mask=row < rows, other=0).to(gl.float32)
    gl.store(out + row, sums.to(out.dtype.element_ty), mask=row < rows)


@gluon.jit
def _matrix(
    x, words, bias, out, panel, half, rows, columns,
    BIASED: gl.constexpr, WARPS: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    blocks = columns // 32
    even, odd = _panel_sums(x, words, panel * blocks * 68, blocks, half, WARPS, BLOCKS)
    lane = gl.arange(0, 8, layout=gl.BlockedLayout([1], [32], [WARPS], [0])) * 2
    row = panel * 32 + half * 16 + lane
    _stored(out, bias, even, row, rows, BIASED)
    _stored(out, bias, odd, row + 1, rows, BIASED)


@gluon.jit
def _rows_times(
    x, words0, words1, words2, bias0, bias1, bias2, out, panels0, panels1, rows0, rows1, rows2, columns, width,
    MATRICES: gl.constexpr, FIRST_BIASED: gl.constexpr, SECOND_BIASED: gl.constexpr, THIRD_BIASED: gl.constexpr,
    WARPS: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    panel, half, slot = gl.program_id(0) // 2, gl.program_id(0) % 2, gl.program_id(1).to(gl.int64)
    x += slot * (columns // 2)
    out += slot * width
    if MATRICES > 2 and panel >= panels0 + panels1:
        further = panel - panels0 - panels1
        _matrix(x, words2, bias2, out + rows0 + rows1, further, half, rows2, columns, THIRD_BIASED, WARPS, BLOCKS)
    elif MATRICES > 1 and panel >= panels0:
        _matrix(x, words1, bias1, out + rows0, panel - panels0, half, rows1, columns, SECOND_BIASED, WARPS, BLOCKS)
    else:
        _matrix(x, words0, bias0, out, panel, half, rows0, columns, FIRST_BIASED, WARPS, BLOCKS)

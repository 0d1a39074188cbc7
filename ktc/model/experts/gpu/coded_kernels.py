"""Products with coded matrices by Triton: codes become weights in registers, or in a copy for many rows.

In: rows sorted by expert, `CodedMatrices`, and where the rows of each expert end. Out: what `grouped_products` returns
for the decoded matrices, with sums in fp32. A program finds its expert from the ends, so that no launch waits for the
host. Sums have one order: results are equal to the bit from run to run.

Few rows are multiplied one by one (`few_rows`), with weights in fp32. Some are multiplied by tensor cores from decoded
tiles (`some_rows`); for many, the matrices of experts that have rows are decoded (`decoded`). Both have the weights in
bf16, with the bits of the CPU's kernels. Importing this needs Triton.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportReturnType=false, reportAssignmentType=false
# The arguments of device code get their types from Triton, which is not typed itself.

from __future__ import annotations

import functools
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktc.model.experts.gpu.code_kernels import (
    INTERPRETED,
    four_codes,
    number_of,
    numbers_of,
    scale_of,
    scales_of_span,
    weights_of_panels,
)  # fmt: skip
from ktc.model.experts.layouts.coded_matrices import CodedMatrices
from ktc.model.experts.layouts.panel_codes import SCALE_BYTES, PanelCodes

_FEW_OF_EXPERT: Final = 8
_PANELS: Final = 4  # that a program multiplies together
SCALE_DTYPES: Final = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "power": torch.uint8, "zero": torch.int32,
    "sixes": torch.float16, "factors": torch.float16, "float8": torch.float32,
}  # fmt: skip


def times_rows(rows: Tensor, matrices: CodedMatrices, ends: Tensor) -> Tensor:
    """Multiply rows with the transpose of their matrix: `(S, K), (G, N, K), (G,) -> (S, N)`."""
    if len(rows) <= len(ends):
        return few_rows(rows, matrices, ends)
    return some_rows(rows, matrices, ends)


def few_rows(rows: Tensor, matrices: CodedMatrices, ends: Tensor) -> Tensor:
    """See `times_rows`: a program multiplies a row with a panel."""
    out = rows.new_empty(len(rows), matrices.shape[1])
    if len(rows):
        grid = matrices.num_panels, len(rows)
        given = rows.contiguous(), ends, out, len(ends)
        _launch(_few_rows, grid, given, matrices, EXPERTS=_experts(ends), BLOCKS=8, num_warps=4)
    return out


def some_rows(rows: Tensor, matrices: CodedMatrices, ends: Tensor) -> Tensor:
    """See `times_rows`: a program multiplies up to 64 rows of an expert with several panels."""
    out = rows.new_empty(len(rows), matrices.shape[1])
    if len(rows):
        block_m = 16 if len(rows) <= _FEW_OF_EXPERT * len(ends) else 64
        tiles = -(-matrices.num_panels // _PANELS)
        most = -(-len(rows) // block_m) + min(len(ends), len(rows))  # tiles of rows, each of one expert
        _launch(
            _some_rows, (most * tiles,), (rows.contiguous(), ends, out, len(ends), tiles), matrices,
            EXPERTS=_experts(ends), BM=block_m, PANELS=_PANELS, BLOCKS=2, num_warps=4, num_stages=3,
        )  # fmt: skip
    return out


def decoded(matrices: CodedMatrices, ends: Tensor | None = None, into: Tensor | None = None) -> Tensor:
    """Return the matrices in bf16 (G, N, K), written `into` a tensor with rows of any distance if there is one.

    With `ends`, those of experts without rows are left undefined.
    """
    out = torch.empty(matrices.shape, dtype=torch.bfloat16, device=matrices.packed.device) if into is None else into
    if out.numel():
        grid = triton.cdiv(triton.cdiv(matrices.columns, 32), 8), matrices.num_panels, len(matrices.packed)
        given = matrices.packed if ends is None else ends, out, out.stride(0), out.stride(1)
        _launch(_decoded, grid, given, matrices, ALL=ends is None, BLOCKS=8, num_warps=8)
    return out


def _experts(ends: Tensor) -> int:
    """Return the length of the vector of all experts: few lengths, since a kernel is compiled for each."""
    return max(128, triton.next_power_of_2(len(ends)))


def _launch(kernel: Any, grid: tuple[int, ...], given: tuple[Any, ...], matrices: CodedMatrices, **more: Any) -> None:
    """Launch a kernel with what it is given, then the bytes of the matrices and their sizes in bytes."""
    packed, codes = matrices.packed, matrices.codes
    assert packed.is_contiguous() and packed.data_ptr() % 16 == 0, "whole experts, one behind the other"
    sizes = packed.shape[1], matrices.begin, matrices.panel_bytes, matrices.num_panels, matrices.rows, matrices.columns
    of_codes = packed.view(torch.uint8 if codes.bits == 8 else torch.int16)
    with torch.cuda.device_of(packed):  # Triton launches on the current device
        kernel[grid](
            *given, of_codes, packed.view(SCALE_DTYPES[codes.scales]), packed, *sizes,
            **constants_of(codes), PARTS=matrices.parts, INTERLEAVED=matrices.interleaved, **more,
        )  # fmt: skip


@functools.cache
def constants_of(codes: PanelCodes) -> dict[str, Any]:
    """Return the arguments of a kernel that codes decide."""
    return {
        "NUMBERS": codes.numbers, "SCALES": codes.scales, "LEAST": codes.least, "GROUP": codes.group,
        "SPAN": codes.span, "NEIGHBOURS": codes.neighbours,
        "HEAD": codes.head, "NBYTES": codes.nbytes, "SCALE": SCALE_BYTES[codes.scales],
    }  # fmt: skip


# Kernels -------------------------------------------------------------------------------------------------------------
@triton.jit
def row_of(lane, panel, rows, PARTS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the matrix row of a panel's output, and whether there is one."""
    width: tl.constexpr = 32 // PARTS
    part, inner = lane // width, panel * width + lane % width
    return (inner * PARTS + part if INTERLEAVED else part * rows + inner), inner < rows


@triton.jit
def _decoded(
    ends, out, out_stride, row_stride,
    codes, scales, factors, expert_bytes, first, panel_bytes, panels, rows, columns,
    NUMBERS: tl.constexpr, SCALES: tl.constexpr, LEAST: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    HEAD: tl.constexpr, NBYTES: tl.constexpr, SCALE: tl.constexpr, PARTS: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALL: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    expert, panel = tl.program_id(2), tl.program_id(1)
    if not ALL:
        before = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        if tl.load(ends + expert) == before:
            return
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    at = expert.to(tl.int64) * expert_bytes + first + panel * panel_bytes + tl.arange(0, 1)
    there = (tl.arange(0, 1) == 0)[:, None] & (block * 32 < columns)[None, :]
    w = weights_of_panels(
        codes, scales, factors, at, there, block,
        NUMBERS, SCALES, LEAST, GROUP, SPAN, NEIGHBOURS, HEAD, NBYTES, SCALE, 1, BLOCKS,
    )  # fmt: skip
    w = tl.reshape(w, (32, BLOCKS * 32))
    row, is_row = row_of(tl.arange(0, 32), panel, rows, PARTS, INTERLEAVED)
    column = tl.program_id(0) * BLOCKS * 32 + tl.arange(0, BLOCKS * 32)
    result = out + expert.to(tl.int64) * out_stride + row[:, None] * row_stride + column[None, :]
    tl.store(result, w, mask=is_row[:, None] & (column < columns)[None, :])


@triton.jit
def _four_columns(n0, n1, x0, x1, scales, place, there, MINIMA: tl.constexpr, SCALES: tl.constexpr):
    """Return the sums (B, lines, lanes) of four columns each: numbers (B, lines, lanes, 2) times x, times scales."""
    scale, least = scale_of(scales, place, there[:, None], SCALES)
    if MINIMA > 0:
        least = tl.load(scales + place + MINIMA, mask=there[:, None], other=0).to(tl.float32)
    if MINIMA > 0 or SCALES == "zero":  # by weight: sums of infinite x and of their minima would be NaN
        scale, least = scale[:, None, :, None], least[:, None, :, None]
        return tl.sum((n0 * scale - least) * x0 + (n1 * scale - least) * x1, 3)
    else:
        return tl.sum(n0 * x0 + n1 * x1, 3) * scale[:, None, :]


@triton.jit
def _four_of_span(n0, n1, x0, x1, scales, factors, span, block, lane, there, SCALES: tl.constexpr):
    """Return the same with scales that have factors in their span, one for each 16 columns."""
    half = (tl.arange(0, 8) // 4)[None, :, None]
    wide_span = span[:, None, None] + tl.zeros((1, 8, 1), tl.int64) + tl.zeros((1, 1, 16), tl.int64)
    known = there[:, None, None] & (half >= 0) & (lane >= 0)[None, None, :]
    scale, least = scales_of_span(
        scales, factors, wide_span, block[:, None, None] + half * 0, half, lane[None, None, :], known, SCALES
    )
    if SCALES == "sixes":
        scale, least = scale[:, :, :, None], least[:, :, :, None]
        return tl.sum((n0 * scale - least) * x0 + (n1 * scale - least) * x1, 3)
    else:
        return tl.sum(n0 * x0 + n1 * x1, 3) * scale


@triton.jit
def panel_sums(
    row, codes, scales, factors, at, columns,
    NUMBERS: tl.constexpr, SCALES: tl.constexpr, LEAST: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    HEAD: tl.constexpr, NBYTES: tl.constexpr, SCALE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return the products of a row with the outputs 0 to 15 of a panel and the others, or with all 32 and zeros.

    `at` are the bytes before the panel. Of numbers `bf16`, which have no scales, `codes` are the weights themselves.
    """
    plain: tl.constexpr = NUMBERS == "bf16"
    wide: tl.constexpr = NUMBERS == "int8" or NUMBERS == "e4m3" or plain
    of_span: tl.constexpr = SCALES == "sixes" or SCALES == "factors" or SCALES == "float8"
    lines: tl.constexpr = 32 // NEIGHBOURS if wide else 8  # of a block: two columns, or four
    beside: tl.constexpr = NEIGHBOURS if wide else 2
    lanes: tl.constexpr = 32 if wide else 16
    lane, line, two = tl.arange(0, lanes), tl.arange(0, lines), tl.arange(0, beside)
    lower = tl.full((BLOCKS, lines, lanes), 0, tl.float32)
    upper = tl.full((BLOCKS, lines, lanes), 0, tl.float32)
    for first_block in range(0, columns, BLOCKS * 32):
        column = first_block + tl.arange(0, BLOCKS) * 32
        there = column < columns
        span, in_span = at + column // SPAN * NBYTES, column % SPAN
        place = (span + in_span // GROUP * (32 * SCALE)) // SCALE
        place = place[:, None] + lane[None, :]
        from_column = (column[:, None] + line[None, :] * (32 // lines))[:, :, None] + two[None, None, :]
        x0 = tl.load(row + from_column, mask=from_column < columns, other=0).to(tl.float32)  # (B, lines, beside)
        if wide:
            words = at // 2 + column * 32 if plain else span + HEAD + in_span * 32
            places = words[:, None] + tl.arange(0, lines * lanes * beside)[None, :]
            word = tl.load(codes + places, mask=there[:, None], other=0)
            if plain:
                number = tl.reshape(word, (BLOCKS, lines, lanes, beside)).to(tl.float32)
                lower += tl.sum(number * x0[:, :, None, :], 3)
            else:
                code = tl.reshape(word.to(tl.int32), (BLOCKS, lines, lanes, beside))
                part = tl.sum(number_of(code, NUMBERS) * x0[:, :, None, :], 3)
                scale, _ = scale_of(scales, place, there[:, None], SCALES)
                lower += part * scale[:, None, :]
        else:
            c0, c1, c2, c3 = four_codes(
                codes, (span + HEAD)[:, None], (in_span // 32)[:, None], there[:, None], NUMBERS
            )
            x1 = tl.load(row + from_column + 2, mask=from_column + 2 < columns, other=0).to(tl.float32)
            x0, x1 = x0[:, :, None, :], x1[:, :, None, :]
            n0, n1 = numbers_of(c0, NUMBERS, BLOCKS), numbers_of(c1, NUMBERS, BLOCKS)
            n2, n3 = numbers_of(c2, NUMBERS, BLOCKS), numbers_of(c3, NUMBERS, BLOCKS)
            if of_span:
                lower += _four_of_span(n0, n1, x0, x1, scales, factors, span, in_span // 32, lane, there, SCALES)
                upper += _four_of_span(n2, n3, x0, x1, scales, factors, span, in_span // 32, lane + 16, there, SCALES)
            else:
                minima: tl.constexpr = SPAN // GROUP * 32 if LEAST else 0
                lower += _four_columns(n0, n1, x0, x1, scales, place, there, minima, SCALES)
                upper += _four_columns(n2, n3, x0, x1, scales, place + 16, there, minima, SCALES)
    return tl.sum(tl.sum(lower, 1), 0), tl.sum(tl.sum(upper, 1), 0)


@triton.jit(do_not_specialize=["experts"])
def _few_rows(
    x, ends, out, experts, codes, scales, factors, expert_bytes, first, panel_bytes, panels, rows, columns,
    NUMBERS: tl.constexpr, SCALES: tl.constexpr, LEAST: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    HEAD: tl.constexpr, NBYTES: tl.constexpr, SCALE: tl.constexpr, PARTS: tl.constexpr, INTERLEAVED: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    panel, slot = tl.program_id(0), tl.program_id(1)
    numbers = tl.arange(0, EXPERTS)
    last = tl.load(ends + numbers, mask=numbers < experts, other=2147483647)
    expert = tl.sum((last <= slot).to(tl.int32), 0)
    if expert >= experts:
        return
    at = expert.to(tl.int64) * expert_bytes + first + panel * panel_bytes
    lower, upper = panel_sums(
        x + slot.to(tl.int64) * columns, codes, scales, factors, at, columns,
        NUMBERS, SCALES, LEAST, GROUP, SPAN, NEIGHBOURS, HEAD, NBYTES, SCALE, BLOCKS,
    )  # fmt: skip
    wide: tl.constexpr = NUMBERS == "int8" or NUMBERS == "e4m3"
    lane = tl.arange(0, 32 if wide else 16)
    result = out + slot.to(tl.int64) * PARTS * rows
    of_lane, is_row = row_of(lane, panel, rows, PARTS, INTERLEAVED)
    tl.store(result + of_lane, lower.to(out.dtype.element_ty), mask=is_row)
    if not wide:
        of_lane, is_row = row_of(lane + 16, panel, rows, PARTS, INTERLEAVED)
        tl.store(result + of_lane, upper.to(out.dtype.element_ty), mask=is_row)


@triton.jit
def tile_of_rows(ends, experts, tile, EXPERTS: tl.constexpr, BM: tl.constexpr):
    """Return the expert of a tile, its first row, and the end of the expert's rows."""
    numbers = tl.arange(0, EXPERTS)
    last = tl.load(ends + numbers, mask=numbers < experts, other=0)
    first = tl.load(ends + numbers - 1, mask=(numbers > 0) & (numbers < experts), other=0)
    tiles = tl.where(numbers < experts, (last - first + BM - 1) // BM, 0)
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    before = tl.sum(tl.where(numbers < expert, tiles, 0), 0)
    start = tl.sum(tl.where(numbers == expert, first, 0), 0) + (tile - before) * BM
    return expert, start, tl.sum(tl.where(numbers == expert, last, 0), 0)


@triton.jit(do_not_specialize=["experts", "tiles"])
def _some_rows(
    x, ends, out, experts, tiles, codes, scales, factors, expert_bytes, first, panel_bytes, panels, rows, columns,
    NUMBERS: tl.constexpr, SCALES: tl.constexpr, LEAST: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    HEAD: tl.constexpr, NBYTES: tl.constexpr, SCALE: tl.constexpr, PARTS: tl.constexpr, INTERLEAVED: tl.constexpr,
    EXPERTS: tl.constexpr, BM: tl.constexpr, PANELS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    expert, start, end = tile_of_rows(ends, experts, tl.program_id(0) // tiles, EXPERTS, BM)
    if expert >= experts:
        return
    panel = tl.program_id(0) % tiles * PANELS + tl.arange(0, PANELS)
    at = expert.to(tl.int64) * expert_bytes + first + panel * panel_bytes
    m, k = tl.arange(0, BM), tl.arange(0, BLOCKS * 32)
    of_row = x + start.to(tl.int64) * columns + tl.minimum(m, end - start - 1)[:, None] * columns  # the last row again
    sums = tl.full((BM, PANELS * 32), 0, tl.float32)
    for column in range(0, columns, BLOCKS * 32):
        block = column // 32 + tl.arange(0, BLOCKS)
        there = (panel < panels)[:, None] & (block * 32 < columns)[None, :]
        w = weights_of_panels(
            codes, scales, factors, at, there, block,
            NUMBERS, SCALES, LEAST, GROUP, SPAN, NEIGHBOURS, HEAD, NBYTES, SCALE, PANELS, BLOCKS,
        )  # fmt: skip
        w = tl.trans(tl.reshape(w, (PANELS * 32, BLOCKS * 32)))
        values = tl.load(of_row + (column + k)[None, :], mask=(column + k < columns)[None, :], other=0)
        if INTERPRETED:  # the interpreter multiplies the bits of bf16 as integers
            sums = tl.dot(values.to(tl.float32), w.to(tl.float32), sums)
        else:
            sums = tl.dot(values, w, sums)
    lane = tl.arange(0, PANELS * 32)
    row, is_row = row_of(lane % 32, tl.program_id(0) % tiles * PANELS + lane // 32, rows, PARTS, INTERLEAVED)
    result = out + (start + m).to(tl.int64)[:, None] * (PARTS * rows) + row[None, :]
    tl.store(result, sums.to(out.dtype.element_ty), mask=(start + m < end)[:, None] & is_row[None, :])

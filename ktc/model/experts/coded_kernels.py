"""Products with coded matrices by Triton: codes become weights in registers, or in a copy for many rows.

In: rows sorted by expert, `CodedMatrices`, and where the rows of each expert end. Out: what `grouped_products` returns
for the decoded matrices, with sums in fp32. A program finds its expert from the ends, so that no launch waits for the
host. Sums have one order: results are equal to the bit from run to run.

Few rows are multiplied one by one (`few_rows`), with weights in fp32. Some are multiplied by tensor cores from decoded
tiles (`some_rows`); for many, the matrices of experts that have rows are decoded (`decoded`). Both have the weights in
bf16, with the bits of the CPU's kernels. Importing this needs Triton.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportReturnType=false
# The arguments of device code get their types from Triton, which is not typed itself.

from __future__ import annotations

import functools
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktc.model.experts.coded_matrices import CodedMatrices
from ktc.model.experts.panel_codes import SCALE_BYTES, PanelCodes

_FEW_OF_EXPERT: Final = 8
_PANELS: Final = 4  # that a program multiplies together
_INTERPRETED: Final = tl.constexpr(triton.knobs.runtime.interpret)
_SCALES: Final = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "power": torch.uint8, "zero": torch.int32,
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


def decoded(matrices: CodedMatrices, ends: Tensor | None = None) -> Tensor:
    """Return the matrices in bf16 (G, N, K). With `ends`, those of experts without rows are left undefined."""
    out = torch.empty(matrices.shape, dtype=torch.bfloat16, device=matrices.packed.device)
    if out.numel():
        grid = triton.cdiv(triton.cdiv(matrices.columns, 32), 8), matrices.num_panels, len(matrices.packed)
        given = matrices.packed if ends is None else ends, out
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
    of_codes = packed.view(torch.int16 if codes.bits == 4 else torch.uint8)
    with torch.cuda.device_of(packed):  # Triton launches on the current device
        kernel[grid](
            *given, of_codes, packed.view(_SCALES[codes.scales]), *sizes,
            **_constants(codes), PARTS=matrices.parts, INTERLEAVED=matrices.interleaved, **more,
        )  # fmt: skip


@functools.cache
def _constants(codes: PanelCodes) -> dict[str, Any]:
    return {
        "NUMBERS": codes.numbers, "SCALES": codes.scales, "LEAST": codes.least, "GROUP": codes.group,
        "SPAN": codes.span, "HEAD": codes.head, "NBYTES": codes.nbytes, "SCALE": SCALE_BYTES[codes.scales],
    }  # fmt: skip


# Parts of kernels ----------------------------------------------------------------------------------------------------
@triton.jit
def _scale_of(scales, at, there, SCALES: tl.constexpr):
    """Return the scales at places, in fp32, and those of `zero` with their zero points."""
    scale = tl.load(scales + at, mask=there, other=0)
    if SCALES == "power":  # 2^(e - 128); the first two are subnormal
        e = scale.to(tl.int32)
        factor = tl.where(e < 2, 0x200000 << e, (e - 1) << 23).to(tl.float32, bitcast=True)
        return factor, factor
    elif SCALES == "zero":
        factor = (scale & -256).to(tl.float32, bitcast=True)
        return factor, factor * (scale & 255).to(tl.float32)
    else:
        return scale.to(tl.float32), scale.to(tl.float32)


@triton.jit
def _number_of(code, NUMBERS: tl.constexpr):
    """Return what codes int32 stand for, in fp32. Integers are made from the bits of 2^23 + code."""
    if NUMBERS == "signed4":
        return (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
    elif NUMBERS == "unsigned4":
        return (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    elif NUMBERS == "int8":
        return ((code ^ 128) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    elif NUMBERS == "e2m1":  # the bits of an fp16 number that is 2^-15 of it
        bits = ((code & 7) << 9 | (code & 8) << 12).to(tl.int16)
        return bits.to(tl.float16, bitcast=True).to(tl.float32) * 32768.0
    else:  # e4m3: 2^-8
        bits = ((code & 127) << 7 | (code & 128) << 8).to(tl.int16)
        return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _weight_of(code, scale, least, NUMBERS: tl.constexpr, SCALES: tl.constexpr, LEAST: tl.constexpr):
    """Return weights in bf16; the product of two numbers of bf16 is rounded once."""
    if (SCALES == "bf16" and NUMBERS == "signed4") and not _INTERPRETED:
        number = (code.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - 136  # 128 + code - 136
        return (number * scale.to(tl.bfloat16)).to(tl.bfloat16)
    elif NUMBERS == "e2m1" and not _INTERPRETED:
        bits = ((code & 7) << 6 | (code & 8) << 12).to(tl.int16)  # of 2^-127 of it
        number = bits.to(tl.bfloat16, bitcast=True) * 1.7014118346046923e38
        return (number.to(tl.bfloat16) * scale.to(tl.bfloat16)).to(tl.bfloat16)
    elif LEAST or SCALES == "zero":
        return (_number_of(code, NUMBERS) * scale - least).to(tl.bfloat16)
    else:
        return (_number_of(code, NUMBERS) * scale).to(tl.bfloat16)


@triton.jit
def _row_of(lane, panel, rows, PARTS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the matrix row of a panel's output, and whether there is one."""
    width: tl.constexpr = 32 // PARTS
    part, inner = lane // width, panel * width + lane % width
    return (inner * PARTS + part if INTERLEAVED else part * rows + inner), inner < rows


@triton.jit
def _weights_of_panels(
    codes, scales, panel, there, block,
    NUMBERS: tl.constexpr, SCALES: tl.constexpr, LEAST: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    HEAD: tl.constexpr, NBYTES: tl.constexpr, SCALE: tl.constexpr, PANELS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return weights of panels' blocks of 32 columns in bf16: (panels, 32 outputs, blocks * 32 columns).

    `panel` (PANELS,) int64 are the bytes before panels, `block` (BLOCKS,) the numbers of blocks.
    """
    wide: tl.constexpr = NUMBERS == "int8" or NUMBERS == "e4m3"
    column = block * 32
    span = panel[:, None] + (column // SPAN * NBYTES)[None, :]  # (P, B)
    in_span = (column % SPAN)[None, :]
    lane = tl.arange(0, 32)
    at = (span + in_span // GROUP * (32 * SCALE))[:, :, None] // SCALE + lane[None, None, :]
    scale, least = _scale_of(scales, at, there[:, :, None], SCALES)  # (P, B, 32)
    if LEAST:
        least = tl.load(scales + at + SPAN // GROUP * 32, mask=there[:, :, None], other=0).to(tl.float32)
    if wide:
        words = span + HEAD + in_span * 32
        places = words[:, :, None] + tl.arange(0, 1024)[None, None, :]
        code = tl.load(codes + places, mask=there[:, :, None], other=0).to(tl.int32)
        code = tl.reshape(code, (PANELS, BLOCKS, 16, 32, 2))
        w = _weight_of(code, scale[:, :, None, :, None], least[:, :, None, :, None], NUMBERS, SCALES, LEAST)
        return tl.reshape(tl.permute(w, (0, 3, 1, 2, 4)), (PANELS, 32, BLOCKS * 32))
    else:
        words = (span + HEAD + in_span * 16) // 2
        places = words[:, :, None] + tl.arange(0, 256)[None, None, :]
        word = tl.load(codes + places, mask=there[:, :, None], other=0).to(tl.int32)
        word = tl.reshape(word, (PANELS, BLOCKS, 8, 16, 2))  # of columns 4 * line + neighbour and two further
        # bits 8 * step + 4 * half: output 16 * half + lane
        halves_s = tl.permute(tl.reshape(scale, (PANELS, BLOCKS, 2, 16)), (0, 1, 3, 2))
        s0, s1 = tl.split(halves_s)
        halves_l = tl.permute(tl.reshape(least, (PANELS, BLOCKS, 2, 16)), (0, 1, 3, 2))
        l0, l1 = tl.split(halves_l)
        s0, s1 = s0[:, :, None, :, None], s1[:, :, None, :, None]
        l0, l1 = l0[:, :, None, :, None], l1[:, :, None, :, None]
        first = tl.join(
            _weight_of(word & 15, s0, l0, NUMBERS, SCALES, LEAST),
            _weight_of(word >> 8 & 15, s0, l0, NUMBERS, SCALES, LEAST),
        )
        second = tl.join(
            _weight_of(word >> 4 & 15, s1, l1, NUMBERS, SCALES, LEAST),
            _weight_of(word >> 12 & 15, s1, l1, NUMBERS, SCALES, LEAST),
        )
        w = tl.join(first, second)  # (panel, block, line, lane, neighbour, step, half)
        return tl.reshape(tl.permute(w, (0, 6, 3, 1, 2, 5, 4)), (PANELS, 32, BLOCKS * 32))


# Kernels -------------------------------------------------------------------------------------------------------------
@triton.jit
def _decoded(
    ends, out, codes, scales, expert_bytes, first, panel_bytes, panels, rows, columns,
    NUMBERS: tl.constexpr, SCALES: tl.constexpr, LEAST: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
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
    w = _weights_of_panels(
        codes, scales, at, there, block, NUMBERS, SCALES, LEAST, GROUP, SPAN, HEAD, NBYTES, SCALE, 1, BLOCKS
    )
    w = tl.reshape(w, (32, BLOCKS * 32))
    row, is_row = _row_of(tl.arange(0, 32), panel, rows, PARTS, INTERLEAVED)
    column = tl.program_id(0) * BLOCKS * 32 + tl.arange(0, BLOCKS * 32)
    result = out + expert.to(tl.int64) * PARTS * rows * columns + row[:, None] * columns + column[None, :]
    tl.store(result, w, mask=is_row[:, None] & (column < columns)[None, :])


@triton.jit
def _four_columns(n0, n1, x0, x1, scales, place, there, MINIMA: tl.constexpr, SCALES: tl.constexpr):
    """Return the sums (B, lines, lanes) of four columns each: numbers (B, lines, lanes, 2) times x, times scales."""
    scale, least = _scale_of(scales, place, there[:, None], SCALES)
    if MINIMA > 0:
        least = tl.load(scales + place + MINIMA, mask=there[:, None], other=0).to(tl.float32)
    if MINIMA > 0 or SCALES == "zero":  # by weight: sums of infinite x and of their minima would be NaN
        scale, least = scale[:, None, :, None], least[:, None, :, None]
        return tl.sum((n0 * scale - least) * x0 + (n1 * scale - least) * x1, 3)
    else:
        return tl.sum(n0 * x0 + n1 * x1, 3) * scale[:, None, :]


@triton.jit(do_not_specialize=["experts"])
def _few_rows(
    x, ends, out, experts, codes, scales, expert_bytes, first, panel_bytes, panels, rows, columns,
    NUMBERS: tl.constexpr, SCALES: tl.constexpr, LEAST: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    HEAD: tl.constexpr, NBYTES: tl.constexpr, SCALE: tl.constexpr, PARTS: tl.constexpr, INTERLEAVED: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    panel, slot = tl.program_id(0), tl.program_id(1)
    numbers = tl.arange(0, EXPERTS)
    last = tl.load(ends + numbers, mask=numbers < experts, other=2147483647)
    expert = tl.sum((last <= slot).to(tl.int32), 0)
    if expert >= experts:
        return
    wide: tl.constexpr = NUMBERS == "int8" or NUMBERS == "e4m3"
    lines: tl.constexpr = 16 if wide else 8  # of a block: two columns, or four
    lanes: tl.constexpr = 32 if wide else 16
    at = expert.to(tl.int64) * expert_bytes + first + panel * panel_bytes
    row = x + slot.to(tl.int64) * columns
    lane, line, two = tl.arange(0, lanes), tl.arange(0, lines), tl.arange(0, 2)
    lower = tl.full((BLOCKS, lines, lanes), 0, tl.float32)
    upper = tl.full((BLOCKS, lines, lanes), 0, tl.float32)
    for first_block in range(0, columns, BLOCKS * 32):
        column = first_block + tl.arange(0, BLOCKS) * 32
        there = column < columns
        span, in_span = at + column // SPAN * NBYTES, column % SPAN
        place = (span + in_span // GROUP * (32 * SCALE)) // SCALE
        place = place[:, None] + lane[None, :]
        if wide:
            words = span + HEAD + in_span * 32
        else:
            words = (span + HEAD + in_span * 16) // 2
        places = words[:, None] + tl.arange(0, lines * lanes * 2)[None, :]
        word = tl.load(codes + places, mask=there[:, None], other=0).to(tl.int32)
        word = tl.reshape(word, (BLOCKS, lines, lanes, 2))
        from_column = (column[:, None] + line[None, :] * (32 // lines))[:, :, None] + two[None, None, :]
        x0 = tl.load(row + from_column, mask=from_column < columns, other=0).to(tl.float32)  # (B, lines, 2)
        if wide:
            part = tl.sum(_number_of(word, NUMBERS) * x0[:, :, None, :], 3)
            scale, _ = _scale_of(scales, place, there[:, None], SCALES)
            lower += part * scale[:, None, :]
        else:
            x1 = tl.load(row + from_column + 2, mask=from_column + 2 < columns, other=0).to(tl.float32)
            x0, x1 = x0[:, :, None, :], x1[:, :, None, :]
            minima: tl.constexpr = SPAN // GROUP * 32 if LEAST else 0
            n0, n1 = _number_of(word & 15, NUMBERS), _number_of(word >> 8 & 15, NUMBERS)
            lower += _four_columns(n0, n1, x0, x1, scales, place, there, minima, SCALES)
            n0, n1 = _number_of(word >> 4 & 15, NUMBERS), _number_of(word >> 12 & 15, NUMBERS)
            upper += _four_columns(n0, n1, x0, x1, scales, place + 16, there, minima, SCALES)
    result = out + slot.to(tl.int64) * PARTS * rows
    total = tl.sum(tl.sum(lower, 1), 0)
    of_lane, is_row = _row_of(lane, panel, rows, PARTS, INTERLEAVED)
    tl.store(result + of_lane, total.to(out.dtype.element_ty), mask=is_row)
    if not wide:
        total = tl.sum(tl.sum(upper, 1), 0)
        of_lane, is_row = _row_of(lane + 16, panel, rows, PARTS, INTERLEAVED)
        tl.store(result + of_lane, total.to(out.dtype.element_ty), mask=is_row)


@triton.jit
def _tile_of_rows(ends, experts, tile, EXPERTS: tl.constexpr, BM: tl.constexpr):
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
    x, ends, out, experts, tiles, codes, scales, expert_bytes, first, panel_bytes, panels, rows, columns,
    NUMBERS: tl.constexpr, SCALES: tl.constexpr, LEAST: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    HEAD: tl.constexpr, NBYTES: tl.constexpr, SCALE: tl.constexpr, PARTS: tl.constexpr, INTERLEAVED: tl.constexpr,
    EXPERTS: tl.constexpr, BM: tl.constexpr, PANELS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    expert, start, end = _tile_of_rows(ends, experts, tl.program_id(0) // tiles, EXPERTS, BM)
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
        w = _weights_of_panels(
            codes, scales, at, there, block, NUMBERS, SCALES, LEAST, GROUP, SPAN, HEAD, NBYTES, SCALE, PANELS, BLOCKS
        )
        w = tl.trans(tl.reshape(w, (PANELS * 32, BLOCKS * 32)))
        values = tl.load(of_row + (column + k)[None, :], mask=(column + k < columns)[None, :], other=0)
        if _INTERPRETED:  # the interpreter multiplies the bits of bf16 as integers
            sums = tl.dot(values.to(tl.float32), w.to(tl.float32), sums)
        else:
            sums = tl.dot(values, w, sums)
    lane = tl.arange(0, PANELS * 32)
    row, is_row = _row_of(lane % 32, tl.program_id(0) % tiles * PANELS + lane // 32, rows, PARTS, INTERLEAVED)
    result = out + (start + m).to(tl.int64)[:, None] * (PARTS * rows) + row[None, :]
    tl.store(result, sums.to(out.dtype.element_ty), mask=(start + m < end)[:, None] & is_row[None, :])

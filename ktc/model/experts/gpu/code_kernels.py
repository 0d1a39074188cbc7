"""Stored codes become weights in registers: device functions of the kernels that multiply coded matrices.

In: bytes of panels as the CPU's kernels store them, and the constants of a format (`constants_of` in
`coded_kernels.py`). Out: numbers and scales in fp32, or weights in bf16 with the bits of the CPU's kernels. Importing
this needs Triton.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportReturnType=false, reportAssignmentType=false
# The arguments of device code get their types from Triton, which is not typed itself.

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

INTERPRETED: Final = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def scale_of(scales, at, there, SCALES: tl.constexpr):
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
def _float8(code):
    """Return numbers of E4M3: their bits in the places of fp16's are 2^-8 of them."""
    bits = ((code & 127) << 7 | (code & 128) << 8).to(tl.int16)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _byte_at(factors, at, there):
    return tl.load(factors + at, mask=there, other=0).to(tl.int32)


@triton.jit
def scales_of_span(scales, factors, span, block, half, lane, there, SCALES: tl.constexpr):
    """Return scales and minima in fp32 that have factors in their span: `sixes`, `factors`, `float8`.

    `span` (int64) are the bytes before a span, `block` and `half` the 16 columns in it, `lane` the output: tensors of
    one shape.
    """
    if SCALES == "float8":
        of_matrix = tl.load(scales + (span // 4 + lane), mask=there, other=0)
        scale = _float8(_byte_at(factors, span + 128 + block * 64 + half * 32 + lane, there)) * of_matrix
        return scale, scale
    elif SCALES == "factors":
        of_span = tl.load(scales + (span // 2 + lane), mask=there, other=0).to(tl.float32)
        byte = _byte_at(factors, span + 64 + block * 64 + half * 32 + lane, there)
        scale = of_span * ((byte ^ 128) - 128).to(tl.float32)
        return scale, scale
    else:
        of_span = tl.load(scales + (span // 2 + lane), mask=there, other=0).to(tl.float32)
        least_of_span = tl.load(scales + (span // 2 + 32 + lane), mask=there, other=0).to(tl.float32)
        plane = span + 128 + (block & 3) * 32 + lane
        for_scale, for_least = _byte_at(factors, plane, there), _byte_at(factors, plane + 128, there)
        lower = _byte_at(factors, plane + 256, there)
        six = tl.where(block < 4, for_scale & 63, lower & 15 | for_scale >> 2 & 48)
        six_of_least = tl.where(block < 4, for_least & 63, lower >> 4 | for_least >> 2 & 48)
        return of_span * six.to(tl.float32), least_of_span * six_of_least.to(tl.float32)


@triton.jit
def _scales_of_lines(scales, factors, span, block, there, SCALES: tl.constexpr):
    """Return scales of outputs 0 to 15 and of the others, then their minima: (panels, blocks, 8 lines, 16, 1)."""
    half = (tl.arange(0, 8) // 4)[None, None, :, None] + tl.zeros((1, 1, 1, 16), tl.int32)
    lane = tl.arange(0, 16)[None, None, None, :]
    wide_span = span[:, :, None, None] + tl.zeros((1, 1, 8, 16), tl.int64)
    number = block[:, :, None, None] + tl.zeros((1, 1, 8, 16), tl.int32)
    known = there[:, :, None, None] & (lane >= 0)
    s0, l0 = scales_of_span(scales, factors, wide_span, number, half, lane, known, SCALES)
    s1, l1 = scales_of_span(scales, factors, wide_span, number, half, lane + 16, known, SCALES)
    return s0[:, :, :, :, None], s1[:, :, :, :, None], l0[:, :, :, :, None], l1[:, :, :, :, None]


@triton.jit
def number_of(code, NUMBERS: tl.constexpr):
    """Return what codes int32 stand for, in fp32. Integers are made from the bits of 2^23 + code."""
    if NUMBERS == "signed4":
        return (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
    elif NUMBERS == "signed6":
        return (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388640.0
    elif NUMBERS == "unsigned4" or NUMBERS == "unsigned5":
        return (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    elif NUMBERS == "int8":
        return ((code ^ 128) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    elif NUMBERS == "e2m1":  # the bits of an fp16 number that is 2^-15 of it
        bits = ((code & 7) << 9 | (code & 8) << 12).to(tl.int16)
        return bits.to(tl.float16, bitcast=True).to(tl.float32) * 32768.0
    else:
        return _float8(code)


@triton.jit
def numbers_of(code, NUMBERS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the numbers of codes of 16 outputs in blocks: (blocks, 8 lines, 16, 2)."""
    return number_of(tl.reshape(code, (BLOCKS, 8, 16, 2)), NUMBERS)


@triton.jit
def _weight_of(code, scale, least, NUMBERS: tl.constexpr, SCALES: tl.constexpr, LEAST: tl.constexpr):
    """Return weights in bf16; the product of two numbers of bf16 is rounded once."""
    if (SCALES == "bf16" and NUMBERS == "signed4") and not INTERPRETED:
        number = (code.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - 136  # 128 + code - 136
        return (number * scale.to(tl.bfloat16)).to(tl.bfloat16)
    elif (NUMBERS == "e2m1" and SCALES == "power") and not INTERPRETED:
        bits = ((code & 7) << 6 | (code & 8) << 12).to(tl.int16)  # of 2^-127 of it
        number = bits.to(tl.bfloat16, bitcast=True) * 1.7014118346046923e38
        return (number.to(tl.bfloat16) * scale.to(tl.bfloat16)).to(tl.bfloat16)
    elif LEAST or SCALES == "zero" or SCALES == "sixes":
        return (number_of(code, NUMBERS) * scale - least).to(tl.bfloat16)
    else:
        return (number_of(code, NUMBERS) * scale).to(tl.bfloat16)


@triton.constexpr_function
def _high_bits(numbers: str) -> int:
    """Return the bits of a code beside its lower four, which are stored in lines of their own."""
    return {"unsigned5": 1, "signed6": 2}.get(numbers, 0)


@triton.jit
def four_codes(codes, begin, block, there, NUMBERS: tl.constexpr):
    """Return the codes in words of 16 bits, each (..., 256): of a line, a lane and a neighbour.

    A word has four: of outputs 0 to 15 for two columns and for the two further ones, then the same of outputs 16 to
    31. `begin` (..., 1) are the bytes before a span's codes, `block` (..., 1) the numbers of blocks. Codes of five or
    six bits have their upper bits in one line behind four or two lines of lower ones.
    """
    high: tl.constexpr = _high_bits(NUMBERS)
    word = tl.arange(0, 256)
    if high == 0:
        places = (begin + block * 512) // 2 + word
        low = tl.load(codes + places, mask=there, other=0).to(tl.int32)
        return low & 15, low >> 8 & 15, low >> 4 & 15, low >> 12 & 15
    else:
        lines: tl.constexpr = 4 // high  # of lower bits in a unit
        line = word // 32
        unit = (begin + block * (512 + high * 128)) // 2 + line // lines * ((lines + 1) * 32)
        in_line = word % 32
        low = tl.load(codes + (unit + line % lines * 32 + in_line), mask=there, other=0).to(tl.int32)
        up = tl.load(codes + (unit + lines * 32 + in_line), mask=there, other=0).to(tl.int32)
        shift = line % lines * (2 * high)
        mask: tl.constexpr = 2 * high - 1  # 1 or 3
        return (
            low & 15 | (up >> shift & mask) << 4,
            low >> 8 & 15 | (up >> shift + 8 & mask) << 4,
            low >> 4 & 15 | (up >> shift + high & mask) << 4,
            low >> 12 & 15 | (up >> shift + 8 + high & mask) << 4,
        )


@triton.jit
def weights_of_panels(
    codes, scales, factors, panel, there, block,
    NUMBERS: tl.constexpr, SCALES: tl.constexpr, LEAST: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    HEAD: tl.constexpr, NBYTES: tl.constexpr, SCALE: tl.constexpr, PANELS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return weights of panels' blocks of 32 columns in bf16: (panels, 32 outputs, blocks * 32 columns).

    `panel` (PANELS,) int64 are the bytes before panels, `block` (BLOCKS,) the numbers of blocks.
    """
    wide: tl.constexpr = NUMBERS == "int8" or NUMBERS == "e4m3"
    of_span: tl.constexpr = SCALES == "sixes" or SCALES == "factors" or SCALES == "float8"
    column = block * 32
    span = panel[:, None] + (column // SPAN * NBYTES)[None, :]  # (P, B)
    in_span = (column % SPAN)[None, :]
    lane = tl.arange(0, 32)
    if not of_span:
        at = (span + in_span // GROUP * (32 * SCALE))[:, :, None] // SCALE + lane[None, None, :]
        scale, least = scale_of(scales, at, there[:, :, None], SCALES)  # (P, B, 32)
        if LEAST:
            least = tl.load(scales + at + SPAN // GROUP * 32, mask=there[:, :, None], other=0).to(tl.float32)
    if wide:
        words = span + HEAD + in_span * 32
        places = words[:, :, None] + tl.arange(0, 1024)[None, None, :]
        code = tl.load(codes + places, mask=there[:, :, None], other=0).to(tl.int32)
        code = tl.reshape(code, (PANELS, BLOCKS, 32 // NEIGHBOURS, 32, NEIGHBOURS))
        w = _weight_of(code, scale[:, :, None, :, None], least[:, :, None, :, None], NUMBERS, SCALES, LEAST)
        return tl.reshape(tl.permute(w, (0, 3, 1, 2, 4)), (PANELS, 32, BLOCKS * 32))
    else:
        c0, c1, c2, c3 = four_codes(
            codes, (span + HEAD)[:, :, None], (in_span // 32)[:, :, None], there[:, :, None], NUMBERS
        )
        c0 = tl.reshape(c0, (PANELS, BLOCKS, 8, 16, 2))  # of columns 4 * line + neighbour and two further
        c1 = tl.reshape(c1, (PANELS, BLOCKS, 8, 16, 2))
        c2 = tl.reshape(c2, (PANELS, BLOCKS, 8, 16, 2))
        c3 = tl.reshape(c3, (PANELS, BLOCKS, 8, 16, 2))
        if of_span:
            s0, s1, l0, l1 = _scales_of_lines(scales, factors, span, in_span // 32, there, SCALES)
        else:
            halves_s = tl.permute(tl.reshape(scale, (PANELS, BLOCKS, 2, 16)), (0, 1, 3, 2))
            s0, s1 = tl.split(halves_s)
            halves_l = tl.permute(tl.reshape(least, (PANELS, BLOCKS, 2, 16)), (0, 1, 3, 2))
            l0, l1 = tl.split(halves_l)
            s0, s1 = s0[:, :, None, :, None], s1[:, :, None, :, None]
            l0, l1 = l0[:, :, None, :, None], l1[:, :, None, :, None]
        first = tl.join(
            _weight_of(c0, s0, l0, NUMBERS, SCALES, LEAST),
            _weight_of(c1, s0, l0, NUMBERS, SCALES, LEAST),
        )
        second = tl.join(
            _weight_of(c2, s1, l1, NUMBERS, SCALES, LEAST),
            _weight_of(c3, s1, l1, NUMBERS, SCALES, LEAST),
        )
        w = tl.join(first, second)  # (panel, block, line, lane, neighbour, step, half)
        return tl.reshape(tl.permute(w, (0, 6, 3, 1, 2, 5, 4)), (PANELS, 32, BLOCKS * 32))

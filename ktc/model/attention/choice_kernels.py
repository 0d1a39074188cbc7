"""Device code of the choice: scores of all positions, estimated from codes, and the numbers of their weights.

Two kernels. A program of the first multiplies the codes of some blocks of positions with those of the queries of a key
head. A program of the second adds the weights of the heads that choose together, and counts their numbers.

The numbers: no more than `k` positions have a weight of 1 / `k` of the heads' sum, so all of these are chosen and have
the greatest number. Below it a power of two has 32 numbers, after 8 powers 16, and after 16 powers 4.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportReturnType=false
# The arguments of device code get their types from Triton, which is not typed itself.

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

_INTERPRETED: Final = tl.constexpr(triton.knobs.runtime.interpret)
HIDDEN: Final = tl.constexpr(-1)
FORCED: Final = tl.constexpr(4096)  # above all numbers
NOT_SPECIALISED: Final = ("positions", "programs", "blocks", "k", "sink", "local")


@triton.jit
def _halves(codes):
    """Return the low and the high half of bytes."""
    if _INTERPRETED:
        return (codes & 15).to(tl.int8), (codes >> 4).to(tl.int8)
    else:
        return tl.inline_asm_elementwise(
            "and.b32 $0, $2, 0x0F0F0F0F; shr.u32 $1, $2, 4; and.b32 $1, $1, 0x0F0F0F0F;", "=&r,=r,r", [codes],
            dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def _bits(codes):
    """Return the eight bits of bytes, the lowest first."""
    if _INTERPRETED:
        return (
            (codes & 1).to(tl.int8), ((codes >> 1) & 1).to(tl.int8), ((codes >> 2) & 1).to(tl.int8),
            ((codes >> 3) & 1).to(tl.int8), ((codes >> 4) & 1).to(tl.int8), ((codes >> 5) & 1).to(tl.int8),
            ((codes >> 6) & 1).to(tl.int8), ((codes >> 7) & 1).to(tl.int8),
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """
            and.b32 $0, $8, 0x01010101;
            shr.u32 $1, $8, 1; and.b32 $1, $1, 0x01010101;
            shr.u32 $2, $8, 2; and.b32 $2, $2, 0x01010101;
            shr.u32 $3, $8, 3; and.b32 $3, $3, 0x01010101;
            shr.u32 $4, $8, 4; and.b32 $4, $4, 0x01010101;
            shr.u32 $5, $8, 5; and.b32 $5, $5, 0x01010101;
            shr.u32 $6, $8, 6; and.b32 $6, $6, 0x01010101;
            shr.u32 $7, $8, 7; and.b32 $7, $7, 0x01010101;
            """, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r", [codes],
            dtype=(tl.int8, tl.int8, tl.int8, tl.int8, tl.int8, tl.int8, tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def _unpacked(codes, ROWS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Return what is stored of codes, as (ROWS, WIDTH) int8, of bytes (ROWS, WIDTH * BITS / 8)."""
    if BITS == 4:
        low, high = _halves(codes)
        fields = tl.permute(tl.join(low, high), (0, 2, 1))
    else:
        b0, b1, b2, b3, b4, b5, b6, b7 = _bits(codes)
        even = tl.join(tl.join(b0, b4), tl.join(b2, b6))
        odd = tl.join(tl.join(b1, b5), tl.join(b3, b7))
        fields = tl.permute(tl.join(even, odd), (0, 2, 3, 4, 1))
    return tl.reshape(fields, (ROWS, WIDTH))


@triton.jit
def _products(a, b, c):
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), c.to(tl.float32)).to(tl.int32)
    else:
        return tl.dot(a, b, c, out_dtype=tl.int32)


@triton.jit
def _of_codes(codes, of_query, there, products, queries, WIDTH: tl.constexpr, BITS: tl.constexpr,
              BLOCK: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """Add the products of a part of keys and queries (ROWS, WIDTH): what is stored of codes, times queries."""
    at = tl.arange(0, WIDTH * BITS // 8)
    stored = tl.load(codes + at[None, :], mask=there[:, None], other=0)
    return _products(_unpacked(stored, BLOCK, WIDTH, BITS), tl.trans(queries), products)


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def estimate(
    coded, factors, offsets, codes, scales, ends, weights, bases, peaks, totals, positions, blocks, programs,
    code_batch, code_head, code_position, scale_batch, scale_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    BITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ALONE: tl.constexpr, EVEN: tl.constexpr,
    STATE: tl.constexpr, STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Write weights (B, K, L, G) beside `bases`, and the maximum and the sum of each head over a program's blocks.

    Heads that choose ALONE have scores in powers of two instead.
    """
    if OVERLAPS == 1:
        tl.extra.cuda.gdc_launch_dependents()
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    program, key_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    member = tl.arange(0, ROWS)
    is_member = member < GROUP
    head = row * HEADS + key_head * GROUP + member
    WIDTH: tl.constexpr = FIRST + SECOND
    d1, b1 = tl.arange(0, FIRST), tl.arange(0, FIRST * BITS // 8)
    q1 = tl.load(coded + head[:, None] * WIDTH + d1[None, :], mask=is_member[:, None], other=0)
    if SECOND > 0:
        d2, b2 = tl.arange(0, SECOND), tl.arange(0, SECOND * BITS // 8)
        q2 = tl.load(coded + head[:, None] * WIDTH + FIRST + d2[None, :], mask=is_member[:, None], other=0)
    factor = tl.load(factors + head, mask=is_member, other=0)
    offset = tl.load(offsets + head, mask=is_member, other=0)
    low, high = tl.load(ends + row * 2), tl.load(ends + row * 2 + 1)
    list_of_head = row * (HEADS // GROUP) + key_head
    codes += row * code_batch + key_head.to(tl.int64) * code_head
    scales += row * scale_batch + key_head.to(tl.int64) * scale_head
    weights += list_of_head * positions * PADDED
    bases += list_of_head * blocks * PADDED
    n = tl.arange(0, BLOCK)
    at1 = n[:, None] * code_position + b1[None, :]
    into = n[:, None] * PADDED + member[None, :]
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.full((BLOCK, ROWS), 0, tl.float32)
    begin_block = low // BLOCK  # the program's first block with a visible position
    start = begin_block + (program - begin_block % programs + programs) % programs
    for block in tl.range(start, high // BLOCK + 1, programs, num_stages=STAGES):
        begin = block * BLOCK
        of_block = codes + begin.to(tl.int64) * code_position
        there = n < positions - begin
        key_scale = tl.load(scales + begin + n) if EVEN else tl.load(scales + begin + n, mask=there, other=0)
        c1 = tl.load(of_block + at1) if EVEN else tl.load(of_block + at1, mask=there[:, None], other=0)
        zeros = tl.zeros((BLOCK, ROWS), tl.int32)
        products = _products(_unpacked(c1, BLOCK, FIRST, BITS), tl.trans(q1), zeros)
        if SECOND > 0:
            at2 = n[:, None] * code_position + FIRST * BITS // 8 + b2[None, :]
            c2 = tl.load(of_block + at2) if EVEN else tl.load(of_block + at2, mask=there[:, None], other=0)
            products = _products(_unpacked(c2, BLOCK, SECOND, BITS), tl.trans(q2), products)
        if BITS == 1:
            products = products * 2
        seen = (n >= low - begin) & (n <= high - begin)
        key_scale = tl.where(seen, key_scale.to(tl.float32), float("nan"))
        estimated = (products - offset[None, :]).to(tl.float32) * key_scale[:, None] * factor[None, :]
        estimated = tl.where(estimated == estimated, estimated, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(estimated, 0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(estimated - base[None, :])
        total = total * tl.exp2(peak - base)[None, :] + weight
        peak = new_peak
        stored = estimated if ALONE else weight.to(tl.bfloat16)
        of_weights = weights + begin.to(tl.int64) * PADDED + into
        if EVEN and ROWS == PADDED:
            tl.store(of_weights, stored)
        else:
            tl.store(of_weights, stored, mask=there[:, None] & (member < PADDED)[None, :])
        if not ALONE:
            tl.store(bases + block * PADDED + member, base, mask=member < PADDED)
    tl.store(peaks + head * STATE + program, peak, mask=is_member)
    tl.store(totals + head * STATE + program, tl.sum(total, 0), mask=is_member)


@triton.jit
def _number(octave, BINS: tl.constexpr):
    """Return the number of a weight that is `octave` powers of two below the weight that all chosen may have."""
    number = (BINS - 1) - octave * (BINS / 16)  # the greatest of three lines, which meet after 8 and 16 powers
    number = tl.maximum(number, (BINS * 3 / 4 - 1) - octave * (BINS / 32))
    number = tl.maximum(number, (BINS * 3 / 8 - 1) - octave * (BINS / 128))
    return tl.minimum(tl.maximum(tl.ceil(number), 0.0), BINS - 1.0).to(tl.int32)


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def weigh(
    weights, bases, peaks, totals, ends, numbers, counts, most_chosen, positions, blocks, programs, sink, local,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr,
    SELECTORS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PROGRAMS: tl.constexpr, ALONE: tl.constexpr,
    BINS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Write the numbers of the weights of positions, those of the heads of a list added, and count them.

    `most_chosen` is the binary logarithm of the weight from which positions have the greatest number.
    """
    if OVERLAPS == 1:
        tl.extra.cuda.gdc_launch_dependents()
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    chunk, selector, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    CHUNK: tl.constexpr = BLOCKS * BLOCK
    flat, member, every = tl.arange(0, CHUNK), tl.arange(0, ROWS), tl.arange(0, PROGRAMS)
    at = chunk * CHUNK + flat
    into = numbers + (row * SELECTORS + selector) * positions + at
    # all that is read is asked for at once
    low, high = tl.load(ends + row * 2), tl.load(ends + row * 2 + 1)
    if ALONE:
        list_of_head = row * (HEADS // GROUP) + selector // GROUP
        score = tl.load(weights + (list_of_head * positions + at) * PADDED + selector % GROUP, mask=at < positions)
    else:  # a key head has one list
        list_of_head = row * SELECTORS + selector
        block, n = chunk * BLOCKS + tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
        place = (block[:, None] * BLOCK + n[None, :])[:, :, None]
        of_positions = (list_of_head * positions + place) * PADDED + member[None, None, :]
        is_weight = (place < positions) & (member < PADDED)[None, None, :]
        weight = tl.load(weights + of_positions, mask=is_weight).to(tl.float32)
        of_blocks = bases + (list_of_head * blocks + block[:, None]) * PADDED + member[None, :]
        base = tl.load(of_blocks, mask=(block < blocks)[:, None] & (member < PADDED)[None, :])
    head = row * HEADS + selector * TOGETHER + member
    is_part = (member < TOGETHER)[:, None] & (every < programs)[None, :]
    of_programs = head[:, None] * PROGRAMS + every[None, :]
    peak = tl.load(peaks + of_programs, mask=is_part, other=float("-inf"))
    total = tl.load(totals + of_programs, mask=is_part, other=0)
    if (chunk * CHUNK > high) | (chunk * CHUNK + CHUNK <= low):
        tl.store(into, tl.full((CHUNK,), HIDDEN, tl.int16), mask=at < positions)
    else:
        seen = (at >= low) & (at <= high)
        most = tl.max(peak, 1)
        most = tl.where(most == float("-inf"), 0.0, most)
        whole = tl.sum(total * tl.exp2(peak - most[:, None]), 1)
        whole = tl.where(whole > 0, whole, 1.0)
        if ALONE:
            octave = most_chosen - (score - tl.sum(most + tl.log2(whole), 0))
        else:
            # what no program of the estimates wrote is not seen
            share = tl.where((member < TOGETHER)[None, :], tl.exp2(base - most[None, :]) * (1.0 / whole)[None, :], 0.0)
            is_member = (member < TOGETHER)[None, None, :]
            summed = tl.sum(tl.where(is_member, weight * share[:, None, :], 0.0), 2)
            octave = most_chosen - tl.log2(tl.maximum(tl.reshape(summed, (CHUNK,)), 1e-37))
        octave = tl.where(seen, octave, 64.0)
        number = _number(octave, BINS)
        is_forced = seen & ((at < low + sink) | (at > high - local))
        stored = tl.where(is_forced, FORCED, tl.where(seen, number, HIDDEN))
        tl.store(into, stored.to(tl.int16), mask=at < positions)
        competes = seen & (is_forced == 0)
        of_list = counts + (row * SELECTORS + selector) * BINS
        counted = tl.histogram(tl.where(competes, number, 0), BINS)
        bins = tl.arange(0, BINS)  # the number 0 is never chosen
        tl.atomic_add(of_list + bins, counted, mask=(counted > 0) & (bins > 0), sem="relaxed")

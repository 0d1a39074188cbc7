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
BINS: Final = tl.constexpr(512)  # numbers of weights: 8 * 32 + 8 * 16 + 32 * 4
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
    coded, factors, codes, scales, ends, weights, bases, peaks, totals, positions, blocks, programs,
    code_batch, code_head, code_position, scale_batch, scale_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    BITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ALONE: tl.constexpr, STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Write weights (B, K, L, G) beside `bases`, and the maximum and the sum of each head over a program's blocks.

    Heads that choose ALONE have scores in powers of two instead.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program, key_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    member = tl.arange(0, ROWS)
    is_member = member < GROUP
    head = row * HEADS + key_head * GROUP + member
    WIDTH: tl.constexpr = FIRST + SECOND
    HALF: tl.constexpr = 8 if BITS == 4 else 1  # what is stored for the code 0, of codes times 1 or 2
    d1, b1 = tl.arange(0, FIRST), tl.arange(0, FIRST * BITS // 8)
    q1 = tl.load(coded + head[:, None] * WIDTH + d1[None, :], mask=is_member[:, None], other=0)
    offset = tl.sum(q1.to(tl.int32), 1)
    if SECOND > 0:
        d2, b2 = tl.arange(0, SECOND), tl.arange(0, SECOND * BITS // 8)
        q2 = tl.load(coded + head[:, None] * WIDTH + FIRST + d2[None, :], mask=is_member[:, None], other=0)
        offset += tl.sum(q2.to(tl.int32), 1)
    offset *= HALF
    factor = tl.load(factors + head, mask=is_member, other=0)
    low, high = tl.load(ends + row * 2), tl.load(ends + row * 2 + 1)
    list_of_head = row * (HEADS // GROUP) + key_head
    codes += row * code_batch + key_head.to(tl.int64) * code_head
    scales += row * scale_batch + key_head.to(tl.int64) * scale_head
    weights += list_of_head * positions * PADDED
    bases += list_of_head * blocks * PADDED
    n = tl.arange(0, BLOCK)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.full((BLOCK, ROWS), 0, tl.float32)
    begin_block = low // BLOCK  # the program's first block with a visible position
    start = begin_block + (program - begin_block % programs + programs) % programs
    for block in tl.range(start, high // BLOCK + 1, programs, num_stages=STAGES):
        at = block * BLOCK + n
        seen = (at >= low) & (at <= high)
        of_key = codes + at.to(tl.int64)[:, None] * code_position
        c1 = tl.load(of_key + b1[None, :], mask=seen[:, None], other=0)
        products = _products(_unpacked(c1, BLOCK, FIRST, BITS), tl.trans(q1), tl.zeros((BLOCK, ROWS), tl.int32))
        if SECOND > 0:
            c2 = tl.load(of_key + FIRST * BITS // 8 + b2[None, :], mask=seen[:, None], other=0)
            products = _products(_unpacked(c2, BLOCK, SECOND, BITS), tl.trans(q2), products)
        if BITS == 1:
            products = products * 2
        key_scale = tl.load(scales + at, mask=seen, other=0).to(tl.float32)
        estimated = (products - offset[None, :]).to(tl.float32) * key_scale[:, None] * factor[None, :]
        estimated = tl.where(seen[:, None] & (estimated == estimated), estimated, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(estimated, 0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(estimated - base[None, :])
        total = total * tl.exp2(peak - base)[None, :] + weight
        peak = new_peak
        into = weights + at[:, None].to(tl.int64) * PADDED + member[None, :]
        is_stored = seen[:, None] & (member < PADDED)[None, :]
        if ALONE:
            tl.store(into, estimated, mask=is_stored)
        else:
            tl.store(into, weight.to(weights.dtype.element_ty), mask=is_stored)
            tl.store(bases + block * PADDED + member, base, mask=member < PADDED)
    tl.store(peaks + head * programs + program, peak, mask=is_member)
    tl.store(totals + head * programs + program, tl.sum(total, 0), mask=is_member)


@triton.jit
def _number(octave):
    """Return the number of a weight that is `octave` powers of two below the weight that all chosen may have."""
    steps = tl.minimum(tl.maximum(octave, 0.0), 8.0) * 32.0
    steps += tl.minimum(tl.maximum(octave - 8.0, 0.0), 8.0) * 16.0
    steps += tl.minimum(tl.maximum(octave - 16.0, 0.0), 32.0) * 4.0
    return tl.maximum(steps.to(tl.int32) * -1 + (BINS - 1), 0)


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def weigh(
    weights, bases, peaks, totals, ends, numbers, counts, most_chosen, positions, blocks, programs, sink, local,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr,
    SELECTORS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PROGRAMS: tl.constexpr, ALONE: tl.constexpr,
    ATOMICS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Write the numbers of the weights of positions, those of the heads of a list added, and count them.

    `most_chosen` is the binary logarithm of the weight from which positions have the greatest number.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk, selector, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    low, high = tl.load(ends + row * 2), tl.load(ends + row * 2 + 1)
    CHUNK: tl.constexpr = BLOCKS * BLOCK
    flat = tl.arange(0, CHUNK)
    into = numbers + (row * SELECTORS + selector) * positions + chunk * CHUNK
    if (chunk * CHUNK > high) | (chunk * CHUNK + CHUNK <= low):
        tl.store(into + flat, tl.full((CHUNK,), HIDDEN, tl.int16), mask=chunk * CHUNK + flat < positions)
    else:
        member, every = tl.arange(0, ROWS), tl.arange(0, PROGRAMS)
        head = row * HEADS + selector * TOGETHER + member
        is_part = (member < TOGETHER)[:, None] & (every < programs)[None, :]
        of_programs = head[:, None] * programs + every[None, :]
        peak = tl.load(peaks + of_programs, mask=is_part, other=float("-inf"))
        total = tl.load(totals + of_programs, mask=is_part, other=0)
        most = tl.max(peak, 1)
        most = tl.where(most == float("-inf"), 0.0, most)
        whole = tl.sum(total * tl.exp2(peak - most[:, None]), 1)
        whole = tl.where(whole > 0, whole, 1.0)
        if ALONE:
            list_of_head = row * (HEADS // GROUP) + selector // GROUP
            at = chunk * CHUNK + flat
            seen = (at >= low) & (at <= high)
            of_list = weights + (list_of_head * positions + at) * PADDED + selector % GROUP
            score = tl.load(of_list, mask=seen, other=float("-inf"))
            octave = most_chosen - (score - tl.sum(most + tl.log2(whole), 0))
        else:  # a key head has one list
            list_of_head = row * SELECTORS + selector
            block, n = chunk * BLOCKS + tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
            is_block = (block >= low // BLOCK) & (block <= high // BLOCK)
            of_blocks = bases + (list_of_head * blocks + block[:, None]) * PADDED + member[None, :]
            is_base = is_block[:, None] & (member < TOGETHER)[None, :]
            base = tl.load(of_blocks, mask=is_base, other=0)
            share = tl.where(is_base, tl.exp2(base - most[None, :]) * (1.0 / whole)[None, :], 0.0)
            place = block[:, None] * BLOCK + n[None, :]
            there = (place >= low) & (place <= high)
            of_positions = (list_of_head * positions + place)[:, :, None] * PADDED + member[None, None, :]
            weight = tl.load(weights + of_positions, mask=there[:, :, None], other=0).to(tl.float32)
            summed = tl.sum(weight * share[:, None, :], 2)
            octave = most_chosen - tl.log2(tl.maximum(tl.reshape(summed, (CHUNK,)), 1e-37))
            at = chunk * CHUNK + flat
            seen = (at >= low) & (at <= high)
        number = _number(octave)
        is_forced = seen & ((at < low + sink) | (at > high - local))
        stored = tl.where(is_forced, FORCED, tl.where(seen, number, HIDDEN))
        tl.store(into + flat, stored.to(tl.int16), mask=at < positions)
        competes = seen & (is_forced == 0)
        of_list = counts + (row * SELECTORS + selector) * BINS
        if ATOMICS:
            tl.atomic_add(of_list + number, tl.full((CHUNK,), 1, tl.int32), mask=competes, sem="relaxed")
        else:
            counted = tl.histogram(tl.where(competes, number, 0), BINS)
            bins = tl.arange(0, BINS)  # the number 0 is never chosen
            tl.atomic_add(of_list + bins, counted, mask=(counted > 0) & (bins > 0), sem="relaxed")

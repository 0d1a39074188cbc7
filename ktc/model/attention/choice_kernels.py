"""Device code of the choice: scores of all positions, estimated from codes, and the numbers of their weights.

Two kernels. A program of the first multiplies the codes of some blocks of positions with those of the queries of a key
head. A program of the second adds the weights of the heads that choose together, and counts their numbers.

The numbers: no more than `k` positions have a weight of 1 / `k` of the heads' sum, so all of these are chosen and have
the greatest number. Below it a power of two has 16 numbers, after 8 powers 8, and after 16 powers 2.
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
LEAST: Final = tl.constexpr(-1e30)  # the score of a hidden position
FORCED: Final = tl.constexpr(4096)  # above all numbers
NOT_SPECIALISED: Final = ("positions", "programs", "k", "sink", "local")


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
def _signs(codes, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return bits as (ROWS, WIDTH) int8, of bytes (ROWS, WIDTH / 8)."""
    b0, b1, b2, b3, b4, b5, b6, b7 = _bits(codes)
    even = tl.join(tl.join(b0, b4), tl.join(b2, b6))
    odd = tl.join(tl.join(b1, b5), tl.join(b3, b7))
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 4, 1)), (ROWS, WIDTH))


@triton.jit
def _products(a, b, c):
    """Add the products of codes (M, K), (K, N) to c. Tensor cores multiply 32 columns of bytes and more."""
    if a.shape[1] < 32:
        return c + tl.sum(a.to(tl.int32)[:, :, None] * b.to(tl.int32)[None, :, :], 1)
    elif _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), c.to(tl.float32)).to(tl.int32)
    else:
        return tl.dot(a, b, c, out_dtype=tl.int32)


@triton.jit
def _part(
    of_block, code_position, there, queries, others, products, FROM: tl.constexpr, WIDTH: tl.constexpr,
    BITS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Add the products of queries (ROWS, WIDTH) with what is stored of codes, from the byte FROM on.

    Of codes of 4 bits, a byte has numbers of both halves of a row: `queries` are those of the first half, and `others`
    of the second, so that no numbers are put in another order.
    """
    byte = FROM + tl.arange(0, WIDTH * BITS // 8)
    of_codes = of_block + tl.arange(0, BLOCK)[:, None] * code_position + byte[None, :]
    if EVEN:
        codes = tl.load(of_codes)
    else:
        codes = tl.load(of_codes, mask=there[:, None], other=0)
    if BITS == 4:
        low, high = _halves(codes)
        products = _products(low, tl.trans(queries), products)
        return _products(high, tl.trans(others), products)
    else:
        return _products(_signs(codes, BLOCK, WIDTH), tl.trans(queries), products)


@triton.jit
def _queries(of_query, is_member, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Return codes of queries: of 4-bit keys those of each half of a row, of signs all, twice."""
    HALF: tl.constexpr = WIDTH // 2 if BITS == 4 else WIDTH
    d, more = tl.arange(0, HALF)[None, :], WIDTH - HALF
    first = tl.load(of_query + d, mask=is_member[:, None], other=0)
    return first, tl.load(of_query + more + d, mask=is_member[:, None], other=0) if BITS == 4 else first


@triton.jit
def _scaled(products, offset, key_scale, factor, BITS: tl.constexpr):
    """Return estimated scores, `LEAST` where the scale of a key is NaN."""
    if BITS == 1:
        products = products * 2
    estimated = (products - offset[None, :]).to(tl.float32) * key_scale[:, None] * factor[None, :]
    return tl.where(estimated == estimated, estimated, LEAST)


@triton.jit
def _first_block(first, program, programs):
    """Return the first of a program's blocks from `first` on."""
    return first + (program - first % programs + programs) % programs


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def estimate(
    coded, factors, offsets, codes, scales, ends, scores, peaks, totals, positions, programs,
    code_batch, code_head, code_position, scale_batch, scale_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    BITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ALONE: tl.constexpr, EVEN: tl.constexpr,
    STATE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write scores (B, K, L, G), in powers of two, and the maximum and the sum of each head over a program's blocks.

    A thread has maxima and sums of its own until the end: no block waits for a reduction. Scores of heads that choose
    together are rounded to fp16.
    """
    program, key_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    member = tl.arange(0, ROWS)
    is_member = member < GROUP
    head = row * HEADS + key_head * GROUP + member
    of_query = coded + head[:, None] * (FIRST + SECOND)
    q1, more1 = _queries(of_query, is_member, FIRST, BITS)
    if SECOND > 0:
        q2, more2 = _queries(of_query + FIRST, is_member, SECOND, BITS)
    factor = tl.load(factors + head, mask=is_member, other=0)
    offset = tl.load(offsets + head, mask=is_member, other=0)
    low, high = tl.load(ends + row * 2), tl.load(ends + row * 2 + 1)
    list_of_head = row * (HEADS // GROUP) + key_head
    codes += row * code_batch + key_head.to(tl.int64) * code_head
    scales += row * scale_batch + key_head.to(tl.int64) * scale_head
    scores += list_of_head * positions * PADDED
    n = tl.arange(0, BLOCK)
    into = n[:, None] * PADDED + member[None, :]
    peak = tl.full((BLOCK, ROWS), LEAST, tl.float32)
    total = tl.full((BLOCK, ROWS), 0, tl.float32)
    for block in tl.range(
        _first_block(low // BLOCK, program, programs), high // BLOCK + 1, programs, num_stages=STAGES
    ):
        begin = block * BLOCK
        of_block, there = codes + begin.to(tl.int64) * code_position, n < positions - begin
        key_scale = tl.load(scales + begin + n) if EVEN else tl.load(scales + begin + n, mask=there, other=0)
        products = tl.zeros((BLOCK, ROWS), tl.int32)
        products = _part(of_block, code_position, there, q1, more1, products, 0, FIRST, BITS, BLOCK, EVEN)
        if SECOND > 0:
            products = _part(
                of_block, code_position, there, q2, more2, products, FIRST * BITS // 8, SECOND, BITS, BLOCK, EVEN
            )  # fmt: skip
        seen = (n >= low - begin) & (n <= high - begin)
        key_scale = tl.where(seen, key_scale.to(tl.float32), float("nan"))
        estimated = _scaled(products, offset, key_scale, factor, BITS)
        smaller = tl.exp2(-tl.abs(estimated - peak))  # of two powers the other one is 1
        total = tl.where(estimated > peak, total * smaller + 1.0, total + smaller)
        peak, of_scores = tl.maximum(peak, estimated), scores + begin.to(tl.int64) * PADDED + into
        stored = estimated if ALONE else tl.minimum(tl.maximum(estimated, -65504.0), 65504.0).to(tl.float16)
        if EVEN and ROWS == PADDED:
            tl.store(of_scores, stored)
        else:
            tl.store(of_scores, stored, mask=there[:, None] & (member < PADDED)[None, :])
    most = tl.max(peak, 0)
    total = tl.sum(total * tl.exp2(peak - most[None, :]), 0)
    is_seen = most > LEAST
    tl.store(peaks + head * STATE + program, tl.where(is_seen, most, float("-inf")), mask=is_member)
    tl.store(totals + head * STATE + program, tl.where(is_seen, total, 0.0), mask=is_member)


@triton.jit
def _number(octave, BINS: tl.constexpr):
    """Return the number of a weight that is `octave` powers of two below the weight that all chosen may have."""
    number = (BINS - 1) - octave * (BINS / 16)  # the greatest of three lines, which meet after 8 and 16 powers
    number = tl.maximum(number, (BINS * 3 / 4 - 1) - octave * (BINS / 32))
    number = tl.maximum(number, (BINS * 3 / 8 - 1) - octave * (BINS / 128))
    return tl.minimum(tl.maximum(tl.ceil(number), 0.0), BINS - 1.0).to(tl.int32)


@triton.jit
def _estimated(scores, of_head, at, positions, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """Return the scores (positions, ROWS) of the heads of a key head."""
    member = tl.arange(0, ROWS)
    of_positions = (of_head * positions + at)[:, None] * PADDED + member[None, :]
    return tl.load(scores + of_positions, mask=(at < positions)[:, None] & (member < PADDED)[None, :])


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def weigh(
    scores, peaks, totals, ends, numbers, counts, most_chosen, positions, programs, sink, local,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr,
    SELECTORS: tl.constexpr, CHUNK: tl.constexpr, PROGRAMS: tl.constexpr, ALONE: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Write the numbers of the weights of positions, those of the heads of a list added, and count them.

    `most_chosen` is the binary logarithm of the weight from which positions have the greatest number.
    """
    chunk, selector, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    flat, member, every = tl.arange(0, CHUNK), tl.arange(0, ROWS), tl.arange(0, PROGRAMS)
    at = chunk * CHUNK + flat
    into = numbers + (row * SELECTORS + selector) * positions + at
    # all loads are issued at once
    low, high = tl.load(ends + row * 2), tl.load(ends + row * 2 + 1)
    if ALONE:
        list_of_head = row * (HEADS // GROUP) + selector // GROUP
        score = tl.load(scores + (list_of_head * positions + at) * PADDED + selector % GROUP, mask=at < positions)
    else:  # a key head has one list
        score = _estimated(scores, row * SELECTORS + selector, at, positions, PADDED, ROWS).to(tl.float32)
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
            weight = tl.exp2(score - most[None, :]) * (1.0 / whole)[None, :]
            summed = tl.sum(tl.where((member < TOGETHER)[None, :], weight, 0.0), 1)
            octave = most_chosen - tl.log2(tl.maximum(summed, 1e-37))  # a number that fp32 has
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

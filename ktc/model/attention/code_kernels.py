"""Device code of codes: the new key and the queries of a step, and which positions a row has.

One kernel. Its codes are those of `key_codes.py`, with the sums of the reference.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportReturnType=false
# The arguments of device code get their types from Triton, which is not typed itself.

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

NOT_SPECIALISED: Final = ("positions",)


@triton.jit
def _rotated(x, WIDTH: tl.constexpr, STAGES: tl.constexpr, SCALE: tl.constexpr):
    """Multiply numbers (WIDTH,), a power of two, by the Hadamard matrix, with the sums of the reference."""
    for stage in tl.static_range(STAGES):
        pairs = tl.permute(tl.reshape(x, (WIDTH // (2 << stage), 2, 1 << stage)), (0, 2, 1))
        low, high = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 2, 1)), (WIDTH,))
    return x * SCALE


@triton.jit
def _rounded(x, largest):
    """Round codes half to even, as PyTorch; NaN is 0."""
    whole = (x + 12582912.0) - 12582912.0  # 1.5 x 2^23, beyond which fp32 has whole numbers
    whole = tl.where(x == x, whole, 0.0)
    return tl.minimum(tl.maximum(whole, -largest), largest)


@triton.jit
def _packed(codes, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Return the bytes of codes (WIDTH,): the numbers `j`, `j + n`, ... of `n` bytes are in byte `j`."""
    IN_BYTE: tl.constexpr = 8 // BITS
    fields = tl.reshape(codes.to(tl.int32), (IN_BYTE, WIDTH // IN_BYTE))
    return tl.sum(fields << (tl.arange(0, IN_BYTE) * BITS)[:, None], 0).to(tl.uint8)


@triton.jit
def _bits_of(codes, BITS: tl.constexpr):
    """Return what is stored of codes: from 1 to 15, or whether it is positive."""
    return codes + 8.0 if BITS == 4 else tl.where(codes > 0, 1.0, 0.0)


@triton.jit
def _key_codes(x, scale, largest, BITS: tl.constexpr):
    """Return the codes of a rotated key."""
    if BITS == 1:
        return tl.where(x < 0, -1.0, 1.0)
    codes = _rounded(x / scale, largest)
    return tl.where(scale == 0, 0.0, codes)


@triton.jit
def _first_seen(seen, last, positions, SAMPLES: tl.constexpr, STRIDE: tl.constexpr):
    """Return the first of the seen columns, which are neighbours and end with `last`."""
    sample = tl.arange(0, SAMPLES) * STRIDE
    is_seen = (tl.load(seen + sample, mask=sample < positions, other=0) != 0) & (sample <= last)
    low = tl.min(tl.where(is_seen, sample, last), 0)  # the first seen one of a few, or the last
    before = low - STRIDE + tl.arange(0, STRIDE)
    is_seen = tl.load(seen + before, mask=before >= 0, other=0) != 0
    return low - tl.sum(is_seen.to(tl.int32), 0)


@triton.jit
def _scale_of_key(most, total, squares, largest, BITS: tl.constexpr):
    """Return the scale of a key's codes."""
    if BITS == 1:
        return tl.where(total == 0, 0.0, squares / tl.where(total == 0, 1.0, total)).to(tl.float32)
    return most / largest


@triton.jit
def _store_key(into, x, scale, largest, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Write the bytes of a part of a key."""
    codes = _bits_of(_key_codes(x, scale, largest, BITS), BITS)
    tl.store(into + tl.arange(0, WIDTH * BITS // 8), _packed(codes, WIDTH, BITS))


@triton.jit
def _store_query(into, x, scale, largest, BITS: tl.constexpr):
    """Write the codes of a part of a query, and return what its products with stored codes have too much."""
    codes = _rounded(x / scale, largest)
    tl.store(into, codes.to(tl.int8))
    total = tl.sum(codes.to(tl.int32), 0)
    return total * 8 if BITS == 4 else total  # stored are codes plus 8, and of signs half of the codes plus 1


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def encode_step(
    query, first, second, mean, signs, position, seen, coded, factors, offsets, codes, scales, ends, counts, scale,
    positions, by_row, first_batch, first_head, first_position, second_batch, second_head, second_position,
    code_batch, code_head, code_position, scale_batch, scale_head, mean_batch, mean_head,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, LISTS: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, FIRST_STAGES: tl.constexpr, SECOND_STAGES: tl.constexpr,
    FIRST_SCALE: tl.constexpr, SECOND_SCALE: tl.constexpr, QUERY_LARGEST: tl.constexpr, KEY_LARGEST: tl.constexpr,
    BITS: tl.constexpr, BINS: tl.constexpr, SAMPLES: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Code the queries and the new key: a program per head of a row, and one that finds the row's first position."""
    row, member = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if member == KEY_HEADS * (GROUP + 1):
        last = tl.load(position).to(tl.int32)
        tl.store(ends + row * 2, _first_seen(seen + row * by_row, last, positions, SAMPLES, STRIDE))
        tl.store(ends + row * 2 + 1, last)
    else:
        key_head, of_group = (member // (GROUP + 1)).to(tl.int64), member % (GROUP + 1)
        d1 = tl.arange(0, FIRST)
        column = tl.load(position)
        head = row * HEADS + key_head * GROUP + of_group
        of_mean = mean + row * mean_batch + key_head * mean_head
        if of_group < GROUP:
            x1 = tl.load(query + head * (FIRST + SECOND) + d1).to(tl.float32)
        else:
            x1 = tl.load(first + row * first_batch + key_head * first_head + column * first_position + d1)
            x1 = x1.to(tl.float32) - tl.load(of_mean + d1)
        x1 = _rotated(x1 * tl.load(signs + d1), FIRST, FIRST_STAGES, FIRST_SCALE)
        most, total, squares = tl.max(tl.abs(x1), 0), tl.sum(tl.abs(x1).to(tl.float64), 0), x1.to(tl.float64)
        squares = tl.sum(squares * squares, 0)
        if SECOND > 0:
            d2 = tl.arange(0, SECOND)
            if of_group < GROUP:
                x2 = tl.load(query + head * (FIRST + SECOND) + FIRST + d2).to(tl.float32)
            else:
                x2 = tl.load(second + row * second_batch + key_head * second_head + column * second_position + d2)
                x2 = x2.to(tl.float32) - tl.load(of_mean + FIRST + d2)
            x2 = _rotated(x2 * tl.load(signs + FIRST + d2), SECOND, SECOND_STAGES, SECOND_SCALE)
            most = tl.maximum(most, tl.max(tl.abs(x2), 0))
            wide = x2.to(tl.float64)
            total, squares = total + tl.sum(tl.abs(wide), 0), squares + tl.sum(wide * wide, 0)
        if of_group < GROUP:
            of_query = most / QUERY_LARGEST
            tl.store(factors + head, of_query * scale)
            of_codes = coded + head * (FIRST + SECOND)
            offset = _store_query(of_codes + d1, x1, of_query, QUERY_LARGEST, BITS)
            if SECOND > 0:
                offset += _store_query(of_codes + FIRST + d2, x2, of_query, QUERY_LARGEST, BITS)
            tl.store(offsets + head, offset)
        else:
            stored = _scale_of_key(most, total, squares, KEY_LARGEST, BITS).to(tl.float16)
            tl.store(scales + row * scale_batch + key_head * scale_head + column, stored)
            of_key = stored.to(tl.float32)
            into = codes + row * code_batch + key_head * code_head + column * code_position
            _store_key(into, x1, of_key, KEY_LARGEST, FIRST, BITS)
            if SECOND > 0:
                _store_key(into + FIRST * BITS // 8, x2, of_key, KEY_LARGEST, SECOND, BITS)
            bins = tl.arange(0, BINS)
            for number in range(LISTS):
                of_list = (row * KEY_HEADS + key_head) * LISTS + number
                tl.store(counts + of_list * BINS + bins, tl.zeros((BINS,), tl.int32))

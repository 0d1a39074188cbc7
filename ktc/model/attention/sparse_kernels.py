"""Sparse attention of one new token over a cache on a GPU, by Triton: an index of codes, a choice, attention over it.

In: queries and what a cache holds with a `StepIndex` of its keys, a mask, and the column of the new token, all on one
GPU. Out: attention's output over the chosen positions, rounded once. Grids depend on shapes alone, so that a CUDA graph
has them, and what a row has follows from the mask. Five kernels, each of which needs the one before:

1. the new key and the queries become codes, and a program per row finds its first and its last visible position;
2. scores are estimated from codes, with the maximum and the sum of each head's softmax by program;
3. the weights of the heads that choose together are added, and become numbers of a histogram: 32 for a power of two;
4. programs read the positions whose number is not below that of the `k`-th, the first ones and the last ones, and
5. their parts are added in one order (`split_kernels.py`).

The choice has the `k` best positions and those with the number of the `k`-th, without weights below 2^-57. Weights of a
shared choice are powers, which the CPU's kernel takes to be linear between whole exponents: near the `k`-th both may
choose others. Importing this needs Triton.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportReturnType=false
# The arguments of device code get their types from Triton, which is not typed itself.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktc.model.attention.decode import KVCacheView
from ktc.model.attention.sparsity import Sparsity
from ktc.model.attention.split_kernels import _dot, _gpu, _merge, _most_programs, _parts
from ktc.model.attention.step_index import StepIndex

_INTERPRETED: Final = tl.constexpr(triton.knobs.runtime.interpret)
_LOG2_E: Final = 1.4426950408889634
_SAMPLES: Final = 1024  # columns of a mask in which a row's first position is searched
_HEADS: Final = 16  # rows of a product of queries
_BLOCK_BYTES: Final = 24 << 10  # of the codes that a program multiplies at once
_TOGETHER: Final = 64  # programs whose parts are added at once
_WEIGHED: Final = 256  # positions whose weights a program adds
_STRIP: Final = 256  # positions of which a program reads the chosen ones
_CHOSEN: Final = 32  # chosen positions that a program reads at once
_BINS: Final = 2048
_PER_OCTAVE: Final = tl.constexpr(32.0)
_LEAST: Final = tl.constexpr(57.0)  # weights of a softmax below 2^-57 are left out: they change no rounded sum
_HIDDEN: Final = tl.constexpr(-1)
_FORCED: Final = tl.constexpr(4096)  # above all bins
_LARGEST: Final = {"int4": (127.0, 7.0, 4), "sign": (15.0, 1.0, 1)}  # of codes of queries and keys, bits of the latter
NOT_SPECIALISED: Final = ("positions", "programs", "k", "sink", "local", "by_row")


@dataclass(frozen=True, slots=True)
class Choice:
    """The numbers (B, S, L) int16 of the positions' weights, and how many have each, (B, S, bins) int32."""

    numbers: Tensor
    counts: Tensor

    def taken(self, k: int) -> Tensor:
        """Return the chosen positions (B, S, L)."""
        reached = self.counts.flip(-1).cumsum(-1).flip(-1) >= k
        bins = torch.arange(_BINS, device=reached.device)
        least = torch.where(reached, bins, 1).amax(-1, keepdim=True)
        return self.numbers >= least


@dataclass(frozen=True, slots=True)
class StepKeys:
    """The keys of a layer, with its `index`. The key at column `position` (1,) int64 is new, and gets its codes.

    `mask` (B or 1, 1, 1, L) is bool; the columns that a row sees are neighbours.
    """

    kv: KVCacheView
    index: StepIndex
    position: Tensor
    mask: Tensor


def attend_sparsely(
    query: Tensor, keys: StepKeys, *, scale: float, sparsity: Sparsity, sinks: Tensor | None = None
) -> tuple[Tensor, Choice]:  # fmt: skip
    """Compute query (B, H, 1, k + r) -> (B, 1, H, v), and return what was chosen."""
    B, H, _, _ = query.shape
    kv = keys.kv
    K, L = kv.keys.shape[1:3]
    with torch.cuda.device_of(query):  # Triton launches on the current device
        choice = _choice(query.contiguous(), keys, scale, sparsity)
        first, second = _parts(kv)
        values = first if kv.values is kv.keys and (second is None or kv.rope_keys is not None) else kv.values
        selectors, VALUE = choice.numbers.shape[1], values.shape[-1]
        programs = max(1, min(-(-L // _STRIP), 2 * _gpu(query.device)[0] // (B * selectors)))
        sums = query.new_empty((B * H, programs, VALUE), dtype=torch.float32)
        state = query.new_empty((2, B * H, programs), dtype=torch.float32)
        out = query.new_empty((B, 1, H, VALUE))
        _attend[(programs, selectors, B)](
            query.contiguous(), first, first if second is None else second, values, choice.numbers, choice.counts,
            sums, state[0], state[1], scale * _LOG2_E, L, programs, sparsity.k,
            *first.stride()[:3], *(first if second is None else second).stride()[:3], *values.stride()[:3],
            HEADS=H, GROUP=H // selectors, SELECTORS=selectors, OF_KEY_HEAD=selectors // K,
            FIRST=first.shape[-1], SECOND=0 if second is None else second.shape[-1], VALUE=VALUE,
            FIRST_BLOCK=_wide(first.shape[-1]), SECOND_BLOCK=0 if second is None else _wide(second.shape[-1]),
            VALUE_BLOCK=_wide(VALUE), SHARED=values is first, ROWS=max(_HEADS, _wide(H // selectors)), STRIP=_STRIP,
            CHOSEN=_CHOSEN, STEPS=_STRIP.bit_length() - 1, BINS=_BINS, num_warps=4,
        )  # fmt: skip
        _merge[(B * H, -(-VALUE // 64))](
            sums, state[0], state[1], out if sinks is None else sinks.detach().float().contiguous(), out, programs, 1,
            HEADS=H, SEVERAL=False, VALUE=VALUE, SINKS=sinks is not None,
            PROGRAMS=max(_most_programs(query.device), triton.next_power_of_2(programs)), BLOCK=64, TOGETHER=16,
            num_warps=4,
        )  # fmt: skip
    return out, choice


def _choice(query: Tensor, step: StepKeys, scale: float, sparsity: Sparsity) -> Choice:
    """Encode the new key, and return the numbers of all positions."""
    kv, index, position, mask = step.kv, step.index, step.position, step.mask
    B, H, _, width = query.shape
    K, L = kv.keys.shape[1:3]
    selectors, group = K if sparsity.shared else H, H // K
    of_query, of_key, bits = _LARGEST[sparsity.index]
    first, second = _parts(kv)
    keys = kv.keys.new_empty
    coded, factors = keys((B, H, width), dtype=torch.int8), keys((B, H), dtype=torch.float32)
    ends, counts = keys((B, 2), dtype=torch.int32), keys((B, selectors, _BINS), dtype=torch.int32)
    seen = mask.view(torch.uint8)
    by_row = seen.stride(0) if seen.shape[0] == B and B > 1 else 0
    sizes = {"HEADS": H, "GROUP": group, "FIRST": first.shape[-1], "SECOND": 0 if second is None else second.shape[-1]}
    other = first if second is None else second
    _encode[(B, K * (group + 1) + 1)](
        query, first, other, index.mean, index.signs, position, seen, coded, factors, index.codes, index.scales, ends,
        counts, scale * _LOG2_E, L, by_row, *first.stride()[:3], *other.stride()[:3], *index.codes.stride()[:3],
        *index.scales.stride()[:2], *index.mean.stride()[:2],
        KEY_HEADS=K, LISTS=selectors // K, QUERY_LARGEST=of_query, KEY_LARGEST=of_key, BITS=bits, BINS=_BINS,
        SAMPLES=_SAMPLES, STRIDE=_wide(-(-L // _SAMPLES)),
        FIRST_STAGES=sizes["FIRST"].bit_length() - 1, SECOND_STAGES=max(0, sizes["SECOND"].bit_length() - 1),
        FIRST_SCALE=1 / math.sqrt(sizes["FIRST"]), SECOND_SCALE=1 / math.sqrt(sizes["SECOND"] or 1),
        num_warps=4, **sizes,
    )  # fmt: skip
    block = max(32, min(128, 1 << (_BLOCK_BYTES // index.codes.shape[-1]).bit_length() - 1))
    programs = max(1, min(-(-L // block), 2 * _gpu(query.device)[0] // (B * K)))
    rows = max(_HEADS, _wide(group))
    scores = keys((B, K, L, group), dtype=torch.float32)
    state = keys((2, B, H, programs), dtype=torch.float32)
    _estimate[(programs, K, B)](
        coded, factors, index.codes, index.scales, seen, ends, scores, state[0], state[1], L, programs, by_row,
        *index.codes.stride()[:3], *index.scales.stride()[:2], BITS=bits, ROWS=rows, BLOCK=block, num_warps=8, **sizes,
    )  # fmt: skip
    numbers = keys((B, selectors, L), dtype=torch.int16)
    _weigh[(-(-L // _WEIGHED), selectors, B)](
        scores, state[0], state[1], seen, ends, numbers, counts, L, programs, by_row, sparsity.sink, sparsity.local,
        HEADS=H, GROUP=group, TOGETHER=H // selectors, ROWS=_wide(H // selectors, 1), SELECTORS=selectors,
        BLOCK=_WEIGHED, PROGRAMS=_TOGETHER, BINS=_BINS, num_warps=4,
    )  # fmt: skip
    return Choice(numbers, counts)


def _wide(width: int, least: int = 16) -> int:
    return max(least, triton.next_power_of_2(width))


# Parts of the kernels ------------------------------------------------------------------------------------------------
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
def _unpacked(codes, ROWS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Return the codes (ROWS, WIDTH) int8 of bytes (ROWS, WIDTH * BITS / 8)."""
    IN_BYTE: tl.constexpr = 8 // BITS
    shifts = (tl.arange(0, IN_BYTE) * BITS).to(tl.uint8)
    fields = (codes[:, None, :] >> shifts[None, :, None]) & (15 if BITS == 4 else 1)
    numbers = tl.reshape(fields, (ROWS, WIDTH)).to(tl.int8)
    return numbers - 8 if BITS == 4 else numbers * 2 - 1


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
def _first_seen(seen, last, SAMPLES: tl.constexpr, STRIDE: tl.constexpr):
    """Return the first of the seen columns, which are neighbours and end with `last`."""
    sample = tl.arange(0, SAMPLES) * STRIDE
    is_seen = tl.load(seen + sample, mask=sample <= last, other=0) != 0
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
def _place_of(taken, wanted, STRIP: tl.constexpr, STEPS: tl.constexpr):
    """Return the first places of a strip up to which `wanted` positions are taken, by their running sum."""
    below = wanted * 0
    for step in tl.static_range(STEPS):
        middle = below + (STRIP >> (step + 1))
        below = tl.where(tl.gather(taken, middle - 1, 0) < wanted, middle, below)
    return below


@triton.jit
def _least_number(counts, k, BINS: tl.constexpr):
    """Return the number of the `k`-th greatest weight, or 1 where fewer compete."""
    bins = tl.arange(0, BINS)
    reached = tl.cumsum(tl.load(counts + bins), 0, reverse=True) >= k
    return tl.max(tl.where(reached, bins, 1), 0)


@triton.jit
def _products(a, b, c):
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), c.to(tl.float32)).to(tl.int32)
    else:
        return tl.dot(a, b, c, out_dtype=tl.int32)


# The kernels ---------------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=NOT_SPECIALISED)
def _encode(
    query, first, second, mean, signs, position, seen, coded, factors, codes, scales, ends, counts, scale, positions,
    by_row, first_batch, first_head, first_position, second_batch, second_head, second_position,
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
        tl.store(ends + row * 2, _first_seen(seen + row * by_row, last, SAMPLES, STRIDE))
        tl.store(ends + row * 2 + 1, last)
    else:
        key_head, of_group = member // (GROUP + 1), member % (GROUP + 1)
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
            q1 = _rounded(x1 / of_query, QUERY_LARGEST)
            tl.store(coded + head * (FIRST + SECOND) + d1, q1.to(tl.int8))
            if SECOND > 0:
                q2 = _rounded(x2 / of_query, QUERY_LARGEST)
                tl.store(coded + head * (FIRST + SECOND) + FIRST + d2, q2.to(tl.int8))
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


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def _estimate(
    coded, factors, codes, scales, seen, ends, scores, peaks, totals, positions, programs, by_row,
    code_batch, code_head, code_position, scale_batch, scale_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write scores (B, K, L, G) in powers of two, and the maximum and the sum of each head over a program's blocks."""
    program, key_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    member = tl.arange(0, ROWS)
    is_member = member < GROUP
    head = row * HEADS + key_head * GROUP + member
    WIDTH: tl.constexpr = FIRST + SECOND
    d1 = tl.arange(0, FIRST)
    q1 = tl.load(coded + head[:, None] * WIDTH + d1[None, :], mask=is_member[:, None], other=0)
    if SECOND > 0:
        d2 = tl.arange(0, SECOND)
        q2 = tl.load(coded + head[:, None] * WIDTH + FIRST + d2[None, :], mask=is_member[:, None], other=0)
    factor = tl.load(factors + head, mask=is_member, other=0)
    low, high = tl.load(ends + row * 2), tl.load(ends + row * 2 + 1)
    codes += row * code_batch + key_head.to(tl.int64) * code_head
    scales += row * scale_batch + key_head.to(tl.int64) * scale_head
    scores += (row * (HEADS // GROUP) + key_head) * positions * GROUP
    n, b1 = tl.arange(0, BLOCK), tl.arange(0, FIRST * BITS // 8)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.full((ROWS,), 0, tl.float32)
    begin_block = low // BLOCK  # the program's first block with a visible position
    start = begin_block + (program - begin_block % programs + programs) % programs
    for block in range(start, high // BLOCK + 1, programs):
        at = block * BLOCK + n
        is_there = (at >= low) & (at <= high)
        is_seen = is_there & (tl.load(seen + row * by_row + at, mask=is_there, other=0) != 0)
        of_key = codes + at.to(tl.int64)[:, None] * code_position
        c1 = tl.load(of_key + b1[None, :], mask=is_there[:, None], other=0)
        products = _products(
            _unpacked(c1, BLOCK, FIRST, BITS), tl.trans(q1), tl.zeros((BLOCK, ROWS), tl.int32)
        )  # fmt: skip
        if SECOND > 0:
            b2 = tl.arange(0, SECOND * BITS // 8)
            c2 = tl.load(of_key + FIRST * BITS // 8 + b2[None, :], mask=is_there[:, None], other=0)
            products = _products(_unpacked(c2, BLOCK, SECOND, BITS), tl.trans(q2), products)
        key_scale = tl.load(scales + at, mask=is_there, other=0).to(tl.float32)
        estimated = products.to(tl.float32) * key_scale[:, None] * factor[None, :]
        estimated = tl.where(is_seen[:, None] & (estimated == estimated), estimated, float("-inf"))
        into = scores + at[:, None].to(tl.int64) * GROUP + member[None, :]
        tl.store(into, estimated, mask=is_there[:, None] & is_member[None, :])
        new_peak = tl.maximum(peak, tl.max(estimated, 0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        total = total * tl.exp2(peak - base) + tl.sum(tl.exp2(estimated - base[None, :]), 0)
        peak = new_peak
    tl.store(peaks + head * programs + program, peak, mask=is_member)
    tl.store(totals + head * programs + program, total, mask=is_member)


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def _weigh(
    scores, peaks, totals, seen, ends, numbers, counts, positions, programs, by_row, sink, local,
    HEADS: tl.constexpr, GROUP: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr, SELECTORS: tl.constexpr,
    BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Write the numbers of the weights of positions, those of the heads of a list added, and count them."""
    block, selector, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    low, high = tl.load(ends + row * 2), tl.load(ends + row * 2 + 1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    into = numbers + (row * SELECTORS + selector) * positions + at
    if (block * BLOCK > high) | (block * BLOCK + BLOCK <= low):
        tl.store(into, tl.full((BLOCK,), _HIDDEN, tl.int16), mask=at < positions)
    else:
        member, together = tl.arange(0, ROWS), tl.arange(0, PROGRAMS)
        head = row * HEADS + selector * TOGETHER + member
        most = tl.full((ROWS,), float("-inf"), tl.float32)
        whole = tl.full((ROWS,), 0, tl.float32)
        for begin in range(0, programs, PROGRAMS):
            every = begin + together
            of_programs = head[:, None] * programs + every[None, :]
            is_part = (member < TOGETHER)[:, None] & (every < programs)[None, :]
            peak = tl.load(peaks + of_programs, mask=is_part, other=float("-inf"))
            total = tl.load(totals + of_programs, mask=is_part, other=0)
            new_most = tl.maximum(most, tl.max(peak, 1))
            base = tl.where(new_most == float("-inf"), 0.0, new_most)
            whole = whole * tl.exp2(most - base) + tl.sum(total * tl.exp2(peak - base[:, None]), 1)
            most = new_most
        most = tl.where(most == float("-inf"), 0.0, most)
        is_there = (at >= low) & (at <= high)
        is_seen = is_there & (tl.load(seen + row * by_row + at, mask=is_there, other=0) != 0)
        key_head, first = selector * TOGETHER // GROUP, selector * TOGETHER % GROUP
        of_position = ((row * (HEADS // GROUP) + key_head) * positions + at) * GROUP
        of_heads = scores + of_position[:, None] + first + member[None, :]
        score = tl.load(of_heads, mask=is_there[:, None] & (member < TOGETHER)[None, :], other=float("-inf"))
        inverse = 1.0 / tl.where(whole > 0, whole, 1.0)
        weight = tl.sum(tl.exp2(score - most[None, :]) * inverse[None, :], 1)
        octave = tl.log2(tl.maximum(weight, 1e-38)) + _LEAST
        number = tl.minimum(tl.maximum(octave, 0.0) * _PER_OCTAVE, BINS - 2.0).to(tl.int32)
        is_forced = is_seen & ((at < low + sink) | (at > high - local))
        competes = is_seen & (is_forced == 0)
        stored = tl.where(is_forced, _FORCED, tl.where(is_seen, number, _HIDDEN))
        tl.store(into, stored.to(tl.int16), mask=at < positions)
        counted = tl.histogram(tl.where(competes, number, BINS - 1), BINS)
        bins = tl.arange(0, BINS)
        of_list = counts + (row * SELECTORS + selector) * BINS
        tl.atomic_add(of_list + bins, counted, mask=(counted > 0) & (bins < BINS - 1), sem="relaxed")


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def _attend(
    query, first, second, values, numbers, counts, sums, peaks, totals, scale, positions, programs, k,
    first_batch, first_head, first_position, second_batch, second_head, second_position,
    value_batch, value_head, value_position,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SELECTORS: tl.constexpr, OF_KEY_HEAD: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, VALUE: tl.constexpr,
    FIRST_BLOCK: tl.constexpr, SECOND_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, SHARED: tl.constexpr,
    ROWS: tl.constexpr, STRIP: tl.constexpr, CHOSEN: tl.constexpr, STEPS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Write the parts of attention over the chosen positions of a program's strips."""
    program, selector, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    member = tl.arange(0, ROWS)
    is_member = member < GROUP
    head = row * HEADS + selector * GROUP + member
    key_head = (selector // OF_KEY_HEAD).to(tl.int64)
    d1, dv, slot = tl.arange(0, FIRST_BLOCK), tl.arange(0, VALUE_BLOCK), tl.arange(0, CHOSEN)
    of_query = query + head[:, None] * (FIRST + SECOND)
    q1 = tl.load(of_query + d1[None, :], mask=is_member[:, None] & (d1 < FIRST)[None, :], other=0)
    if SECOND > 0:
        d2 = tl.arange(0, SECOND_BLOCK)
        q2 = tl.load(of_query + FIRST + d2[None, :], mask=is_member[:, None] & (d2 < SECOND)[None, :], other=0)
        second += row * second_batch + key_head * second_head
    first += row * first_batch + key_head * first_head
    values += row * value_batch + key_head * value_head
    least = _least_number(counts + (row * SELECTORS + selector) * BINS, k, BINS)
    numbers += (row * SELECTORS + selector) * positions
    strip_of = tl.arange(0, STRIP)
    peak, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.full((ROWS,), 0, tl.float32)
    summed = tl.full((ROWS, VALUE_BLOCK), 0, tl.float32)
    for strip in range(program, tl.cdiv(positions, STRIP), programs):
        place = strip * STRIP + strip_of
        number = tl.load(numbers + place, mask=place < positions, other=_HIDDEN).to(tl.int32)
        taken = tl.cumsum((number >= least).to(tl.int32), 0)  # how many are chosen up to each position
        chosen = tl.max(taken, 0)
        for begin in range(0, chosen, CHOSEN):
            wanted = begin + slot + 1
            there = wanted <= chosen
            at = (strip * STRIP + _place_of(taken, wanted, STRIP, STEPS)).to(tl.int64)
            rows1 = first + at[:, None] * first_position
            k1 = tl.load(rows1 + d1[None, :], mask=there[:, None] & (d1 < FIRST)[None, :], other=0)
            score = _dot(q1, tl.trans(k1), tl.full((ROWS, CHOSEN), 0, tl.float32))
            if SECOND > 0:
                rows2 = second + at[:, None] * second_position
                k2 = tl.load(rows2 + d2[None, :], mask=there[:, None] & (d2 < SECOND)[None, :], other=0)
                score = _dot(q2, tl.trans(k2), score)
            score = tl.where(there[None, :], score * scale, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(score, 1))
            weights = tl.exp2(score - new_peak[:, None])
            faded = tl.exp2(peak - new_peak)
            total = total * faded + tl.sum(weights, 1)
            v = k1
            if not SHARED:
                of_values = values + at[:, None] * value_position
                v = tl.load(of_values + dv[None, :], mask=there[:, None] & (dv < VALUE)[None, :], other=0)
            summed = _dot(weights.to(v.dtype), v, summed * faded[:, None])
            peak = new_peak
    part = head * programs + program
    tl.store(peaks + part, peak, mask=is_member)
    tl.store(totals + part, total, mask=is_member)
    tl.store(sums + part[:, None] * VALUE + dv[None, :], summed, mask=is_member[:, None] & (dv < VALUE)[None, :])

"""Attention of few new tokens over a cache on a GPU, by Triton: every program reads some blocks of positions.

In: queries, what a cache holds, and a mask, all on one GPU. Out: attention's output, rounded once. Programs share the
positions (flash decoding): program `i` of `n` reads the blocks `i`, `i + n` and so on, for all query rows of a key
head, so that a cache is read once. It keeps softmax's maximum and sum, and the weighted values; a second kernel adds
the parts in one order, so that results are equal to the bit from run to run. The grid depends on shapes alone. A
program reads from the mask which of its blocks a row sees, and no others of the cache: a graph that was captured for a
capacity takes the time of the positions that are there. Latents are keys and values, and are read once for both.
Importing this needs Triton.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportReturnType=false
# The arguments of device code get their types from Triton, which is not typed itself.

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from ktc.model.attention.decode import KVCacheView

_INTERPRETED: Final = tl.constexpr(triton.knobs.runtime.interpret)
_LOG2_E: Final = 1.4426950408889634
_LEAST: Final = 16  # rows and columns of a product
_TILE_BYTES: Final = 40 << 10  # of the keys and values that a program reads at once
# Heads of 64 with 4,130 of 5,120 positions take 9.6 us in tiles of 64 on an H200, and 12.1 in tiles of 128; with 128
# positions seen they take 7.1 and 9.0.
_POSITIONS: Final = 64
_SMALL: Final = 16 << 10  # bytes of a tile of which a program has few
_SHARE: Final = 0.85  # of a multiprocessor's shared memory that queries and tiles take
# Programs for each multiprocessor: one, or two where each has eight tiles of positions. 4 warps are faster than 8 for
# latents of 512 (57 and 85 us for 131,072 positions on an H200).
_PROGRAMS, _TILES, _FEW_TILES = 2, 8, 2
_MERGED: Final = 32  # columns of an output that a program of the second kernel adds
_TOGETHER: Final = 128  # parts that it adds at once
_ALIGNED: Final = 16  # elements, and bytes of a pointer, of which multiples have a kernel of their own
NOT_SPECIALISED: Final = ("positions", "programs", "groups", "hidden", "tokens")  # values have no kernels of their own
_SCANNED: Final = 2048  # columns of a mask that a program reads at once


@dataclass(frozen=True, slots=True)
class Tiling:
    """`rows` of queries and `positions` of a tile, `programs` that share the positions, warps and stages of each."""

    rows: int
    positions: int
    programs: int
    warps: int
    stages: int


def attend(
    query: Tensor, kv: KVCacheView, *, scale: float, mask: Tensor | None = None, sinks: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:  # fmt: skip
    """Compute query (B, H, T, k + r) -> (B, T, H, v). Without a `mask` new tokens are the last positions.

    `mask` (B or 1, 1, T, at least L) is bool, or is added to the scores, where dtypes' smallest numbers hide
    positions. `sinks` (H,) are further scores without a value. A row that sees no position is zero.
    """
    B, H, T, width = query.shape
    K, L = kv.keys.shape[1:3]
    first, second = _parts(kv)
    shared = _are_values(kv)
    tiling = tiling or tiling_of(query, kv)
    groups = -(-(H // K * T) // tiling.rows)
    sums = query.new_empty((B * H * T, tiling.programs, kv.values.shape[-1]), dtype=torch.float32)
    state = query.new_empty((2, B * H * T, tiling.programs), dtype=torch.float32)
    out = query.new_empty((B, T, H, kv.values.shape[-1]))
    values = first if shared else kv.values
    seen, kind, batch_of_mask, token_of_mask = _mask(mask, B)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        _split[(groups * K, tiling.programs, B)](
            query.contiguous(), first, second if second is not None else first, values,
            first if seen is None else seen, sums, state[0], state[1], scale * _LOG2_E, L, tiling.programs,
            *first.stride()[:3], *(first if second is None else second).stride()[:3], *values.stride()[:3],
            batch_of_mask, token_of_mask, 0.0 if mask is None else _hidden(mask.dtype), groups, T,
            HEADS=H, GROUP=H // K, SEVERAL=T > 1, WIDTH=width, FIRST=first.shape[-1],
            SECOND=0 if second is None else second.shape[-1], VALUE=values.shape[-1],
            FIRST_BLOCK=_block(first.shape[-1]), SECOND_BLOCK=0 if second is None else _block(second.shape[-1]),
            VALUE_BLOCK=_block(values.shape[-1]), SHARED=shared, MASK=kind, ROWS=tiling.rows, BLOCK=tiling.positions,
            SCAN=max(1, _SCANNED // tiling.positions), num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip
        _merge[(B * H * T, -(-values.shape[-1] // _MERGED))](
            sums, state[0], state[1], out if sinks is None else sinks.detach().contiguous(), out,
            tiling.programs, T, HEADS=H, SEVERAL=T > 1, VALUE=values.shape[-1], SINKS=sinks is not None,
            PROGRAMS=max(_most_programs(query.device), triton.next_power_of_2(tiling.programs)), BLOCK=_MERGED,
            TOGETHER=_TOGETHER, num_warps=4,
        )  # fmt: skip
    return out


def tiling_of(query: Tensor, kv: KVCacheView) -> Tiling:
    """Return the tiling of a call: by shapes and the GPU alone, so that a captured step has one grid."""
    B, H, T, width = query.shape
    K, L = kv.keys.shape[1:3]
    parts = [part for part in _parts(kv) if part is not None]
    wide = _block(kv.values.shape[-1])
    row_bytes = sum(_block(part.shape[-1]) for part in parts) + wide * (not _are_values(kv))
    row_bytes *= query.element_size()
    positions = max(_LEAST, min(_POSITIONS, 1 << (_TILE_BYTES // row_bytes).bit_length() - 1))
    rows = max(_LEAST, min(64 if wide <= 256 else 32, triton.next_power_of_2(H // K * T)))
    processors, memory = _gpu(query.device)
    room = int(memory * _SHARE) - rows * width * query.element_size()
    stages = max(1, min(3, room // (positions * row_bytes)))
    beside = B * K * -(-(H // K * T) // rows)
    one, several = -(-processors // beside), -(-_PROGRAMS * processors // beside)
    tiles = _TILES if positions * row_bytes > _SMALL else _FEW_TILES
    programs = max(1, min(-(-L // positions), max(one, min(several, L // (tiles * positions)))))
    return Tiling(rows, positions, programs, 4 if rows * wide <= 16 * 512 else 8, stages)


def _most_programs(device: torch.device) -> int:
    """Return a power of two that is not smaller than the programs of a tiling, so that all have one second kernel."""
    return triton.next_power_of_2(_PROGRAMS * _gpu(device)[0])


@functools.cache
def _gpu(device: torch.device) -> tuple[int, int]:
    """Return the multiprocessors of a GPU, and the bytes of memory that a program on one of them may have."""
    if device.type != "cuda":
        return 2, 100 << 10  # of Triton's interpreter
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


def _parts(kv: KVCacheView) -> tuple[Tensor, Tensor | None]:
    """Return keys in two parts, of which products have powers of two as widths: latents and rotary keys, or halves."""
    if kv.rope_keys is not None:
        return kv.keys, kv.rope_keys
    width = kv.keys.shape[-1]
    power = 1 << width.bit_length() - 1
    if width == power or width < _LEAST:
        return kv.keys, None
    return kv.keys[..., :power], kv.keys[..., power:]


def _are_values(kv: KVCacheView) -> bool:
    """Return whether the first part of the keys is the values too, so that a program reads them once."""
    return kv.values is kv.keys and (kv.rope_keys is not None or _parts(kv)[1] is None)


def _block(width: int) -> int:
    return max(_LEAST, triton.next_power_of_2(width))


def _mask(mask: Tensor | None, batch: int) -> tuple[Tensor | None, int, int, int]:
    """Return a mask as its kernel reads it, its kind (none, bool, added), and the strides of sequences and tokens.

    Strides are multiples of `_ALIGNED`, for which Triton compiles one kernel; those of a captured step are.
    """
    if mask is None:
        return None, 0, 0, 0
    if mask.stride(-1) != 1 or mask.stride(0) % _ALIGNED or mask.stride(2) % _ALIGNED or mask.data_ptr() % _ALIGNED:
        mask = functional.pad(mask, (0, -mask.shape[-1] % _ALIGNED)).contiguous()
    by_sequence = mask.stride(0) if mask.shape[0] == batch and batch > 1 else 0
    seen = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    return seen, 1 if mask.dtype == torch.bool else 2, by_sequence, mask.stride(2)


def _hidden(dtype: torch.dtype) -> float:
    """Return the number of an added mask up to which a position is hidden."""
    return torch.finfo(dtype).min / 2 if dtype.is_floating_point else 0.0


# Device code ---------------------------------------------------------------------------------------------------------
@triton.jit
def _dot(a, b, c):
    if _INTERPRETED:  # the interpreter multiplies the bits of bf16 as integers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), c)
    elif a.dtype == tl.float32:
        return tl.dot(a, b, c, input_precision="ieee")
    else:
        return tl.dot(a, b, c)


@triton.jit
def _tile(numbers, begin, stride, n, d, there, WIDTH: tl.constexpr):
    """Return the rows of some positions: (positions, block of columns)."""
    rows = numbers + begin.to(tl.int64) * stride + n[:, None] * stride
    return tl.load(rows + d[None, :], mask=there[:, None] & (d < WIDTH)[None, :], other=0)


@triton.jit
def _masked(scores, mask, at, there, hidden, last, MASK: tl.constexpr):
    """Return scores with what a mask adds, and -inf where a token does not see a position."""
    if MASK == 0:
        seen = at <= last
    elif MASK == 1:
        seen = tl.load(mask + at, mask=there, other=0) != 0
    else:
        added = tl.load(mask + at, mask=there, other=hidden).to(tl.float32)
        seen = added > hidden
        scores += tl.where(seen, added, 0.0) * 1.4426950408889634
    return tl.where(seen & there, scores, float("-inf"))


@triton.jit
def _is_seen(mask, at, there, hidden, MASK: tl.constexpr):
    """Return which columns of a mask show their positions."""
    if MASK == 1:
        return tl.load(mask + at, mask=there, other=0) != 0
    else:
        return tl.load(mask + at, mask=there, other=hidden).to(tl.float32) > hidden


@triton.jit
def _blocks_of(
    program, programs, positions, mask, of_token, hidden, tokens, MASK: tl.constexpr,
    BLOCK: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Return the first of the program's blocks that a token sees, and the one behind the last."""
    count = tl.cdiv(tl.cdiv(positions, BLOCK) - program, programs)
    low, high = count * 0, count
    if MASK > 0:
        low, high = count, count * 0
        number, column = tl.arange(0, SCAN), tl.arange(0, BLOCK)
        for begin in range(0, count, SCAN):
            block = begin + number
            at = (program + block * programs)[:, None] * BLOCK + column[None, :]
            there = (at < positions) & (block < count)[:, None]
            seen = tl.zeros((SCAN, BLOCK), tl.int32)
            for token in range(tokens):
                seen |= _is_seen(mask + token * of_token, at, there, hidden, MASK).to(tl.int32)
            any_seen = tl.max(seen, 1) > 0
            low = tl.minimum(low, tl.min(tl.where(any_seen, block, count), 0))
            high = tl.maximum(high, tl.max(tl.where(any_seen, block + 1, 0), 0))
    return low, high


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def _split(
    query, first, second, values, mask, sums, peaks, totals, scale, positions, programs,
    first_batch, first_head, first_position, second_batch, second_head, second_position,
    value_batch, value_head, value_position, mask_batch, mask_token, hidden, groups, tokens,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SEVERAL: tl.constexpr, WIDTH: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, VALUE: tl.constexpr,
    FIRST_BLOCK: tl.constexpr, SECOND_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    SHARED: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    if not SEVERAL:
        tokens = 1
    key_head, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    program, sequence = tl.program_id(1), tl.program_id(2)
    row = group * ROWS + tl.arange(0, ROWS)  # of the query rows of a key head: its heads, each with its tokens
    is_row = row < GROUP * tokens
    of_call = sequence.to(tl.int64) * (HEADS * tokens) + key_head * (GROUP * tokens) + row
    d1, dv, n = tl.arange(0, FIRST_BLOCK), tl.arange(0, VALUE_BLOCK), tl.arange(0, BLOCK)
    of_query = query + of_call[:, None] * WIDTH
    q1 = tl.load(of_query + d1[None, :], mask=is_row[:, None] & (d1 < FIRST)[None, :], other=0)
    if SECOND > 0:
        d2 = tl.arange(0, SECOND_BLOCK)
        q2 = tl.load(of_query + FIRST + d2[None, :], mask=is_row[:, None] & (d2 < SECOND)[None, :], other=0)
        second += sequence.to(tl.int64) * second_batch + key_head.to(tl.int64) * second_head
    first += sequence.to(tl.int64) * first_batch + key_head.to(tl.int64) * first_head
    values += sequence.to(tl.int64) * value_batch + key_head.to(tl.int64) * value_head
    mask += sequence.to(tl.int64) * mask_batch
    low, high = _blocks_of(program, programs, positions, mask, mask_token, hidden, tokens, MASK, BLOCK, SCAN)
    token = tl.zeros((1, 1), tl.int32)  # one load of the mask serves all rows of one token
    if SEVERAL:
        token = (row % tokens)[:, None]
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.full((ROWS,), 0, tl.float32)
    summed = tl.full((ROWS, VALUE_BLOCK), 0, tl.float32)
    for block in range(low, high):
        begin = (program + block * programs) * BLOCK
        at, there = begin + n, begin + n < positions
        k1 = _tile(first, begin, first_position, n, d1, there, FIRST)
        scores = _dot(q1, tl.trans(k1), tl.full((ROWS, BLOCK), 0, tl.float32))
        if SECOND > 0:
            k2 = _tile(second, begin, second_position, n, d2, there, SECOND)
            scores = _dot(q2, tl.trans(k2), scores)
        last = positions - tokens + token  # that a token sees without a mask
        scores = _masked(scores * scale, mask + token * mask_token, at[None, :], there[None, :], hidden, last, MASK)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - base[:, None])
        faded = tl.exp2(peak - base)
        total = total * faded + tl.sum(weights, 1)
        if SHARED:
            v = k1
        else:
            v = _tile(values, begin, value_position, n, dv, there, VALUE)
        summed = _dot(weights.to(v.dtype), v, summed * faded[:, None])
        peak = new_peak
    part = of_call * programs + program
    tl.store(peaks + part, peak, mask=is_row)
    tl.store(totals + part, total, mask=is_row)
    tl.store(sums + part[:, None] * VALUE + dv[None, :], summed, mask=is_row[:, None] & (dv < VALUE)[None, :])


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def _merge(
    sums, peaks, totals, sinks, out, programs, tokens,
    HEADS: tl.constexpr, SEVERAL: tl.constexpr, VALUE: tl.constexpr, SINKS: tl.constexpr, PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    if not SEVERAL:
        tokens = 1
    row = tl.program_id(0).to(tl.int64)
    head, token = row // tokens % HEADS, row % tokens
    every = tl.arange(0, PROGRAMS)
    peak = tl.load(peaks + row * programs + every, mask=every < programs, other=float("-inf"))
    total = tl.load(totals + row * programs + every, mask=every < programs, other=0)
    most = tl.max(peak, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        most = tl.maximum(most, sink)
    most = tl.where(most == float("-inf"), 0.0, most)
    whole = tl.sum(total * tl.exp2(peak - most), 0)
    if SINKS:
        whole += tl.exp2(sink - most)
    column, together = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, TOGETHER)
    summed = tl.full((BLOCK,), 0, tl.float32)
    for begin in range(0, programs, TOGETHER):
        number = begin + together
        of_peak = tl.load(peaks + row * programs + number, mask=number < programs, other=float("-inf"))
        values = tl.load(
            sums + (row * programs + number)[:, None] * VALUE + column[None, :],
            mask=(number < programs)[:, None] & (column < VALUE)[None, :], other=0,
        )  # fmt: skip
        summed += tl.sum(values * tl.exp2(of_peak - most)[:, None], 0)
    result = summed / tl.where(whole > 0, whole, 1.0)
    of_token = row // (HEADS * tokens) * tokens + token
    tl.store(out + (of_token * HEADS + head) * VALUE + column, result.to(out.dtype.element_ty), mask=column < VALUE)

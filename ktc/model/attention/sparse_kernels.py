"""Sparse attention of one new token over a cache on a GPU, by Triton: an index of codes, a choice, attention over it.

In: queries and what a cache holds with a `StepIndex` of its keys, a mask, and the column of the new token, all on one
GPU. Out: attention's output over the chosen positions, rounded once. Grids depend on shapes alone, so that a CUDA graph
has them, and what a row has follows from the mask. Five kernels, each of which needs the one before:

1. the new key and the queries become codes, and a program per row finds its first and its last visible position;
2. scores are estimated from codes, with the maximum and the sum of each head's softmax by program;
3. the weights of the heads that choose together are added, and become numbers of a histogram;
4. programs list and read the positions whose number is not below that of the `k`-th, the first and the last ones, and
5. their parts are added in one order (`split_kernels.py`).

The choice has the `k` best positions and those with the number of the `k`-th, without weights below 2^-47 of the heads'
sum over `k`. Scores of a shared choice are rounded to fp16, and weights are powers, which the CPU's kernel takes to be
linear between whole exponents: near the `k`-th both may choose others. Importing this needs Triton.
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
from torch import Tensor

from ktc.model.attention.choice_kernels import estimate, weigh
from ktc.model.attention.chosen_kernels import attend_listed
from ktc.model.attention.code_kernels import encode_step
from ktc.model.attention.decode import KVCacheView
from ktc.model.attention.sparsity import Sparsity
from ktc.model.attention.split_kernels import _gpu, _merge, _most_programs, _parts
from ktc.model.attention.step_index import StepIndex

_LOG2_E: Final = 1.4426950408889634
_SAMPLES: Final = 1024  # columns of a mask in which a row's first position is searched
_LARGEST: Final = {"int4": (127.0, 7.0, 4), "sign": (15.0, 1.0, 1)}  # of codes of queries and keys, bits of the latter
_BINS: Final = 256  # numbers of weights


@dataclass(frozen=True, slots=True)
class Choice:
    """The numbers (B, S, L) int16 of the positions' weights, and how many have each, (B, S, bins) int32."""

    numbers: Tensor
    counts: Tensor

    def taken(self, k: int) -> Tensor:
        """Return the chosen positions (B, S, L)."""
        reached = self.counts.flip(-1).cumsum(-1).flip(-1) >= k
        bins = torch.arange(self.counts.shape[-1], device=reached.device)
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


@dataclass(frozen=True, slots=True)
class SparseTiling:
    """How the kernels of a call share their work.

    A program of the estimates multiplies the codes of `block` positions at once; one of the weights has `chunk`
    positions; one of attention lists `strips` of `strip` positions at once, and reads `chosen` rows at once.
    """

    encode_warps: int
    block: int
    estimating: int
    estimate_warps: int
    estimate_stages: int
    rows: int
    chunk: int
    weigh_warps: int
    attending: int
    strip: int
    strips: int
    chosen: int
    attend_warps: int
    attend_stages: int
    merged: int
    together: int


@dataclass(frozen=True, slots=True)
class _Coded:
    """Codes, factors and `offsets` of queries, and the first and the last position of each row."""

    queries: Tensor
    factors: Tensor
    offsets: Tensor
    ends: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True)
class _Estimated:
    """Scores (B, K, L, G) in powers of two, and the `state` (2, B, H, programs) of the softmax."""

    scores: Tensor
    state: Tensor


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a call: S lists of positions, and `group` heads of a key head."""

    batch: int
    heads: int
    key_heads: int
    positions: int
    lists: int
    first: int
    second: int
    bits: int

    @property
    def group(self) -> int:
        return self.heads // self.key_heads

    @property
    def together(self) -> int:
        return self.heads // self.lists

    @property
    def padded(self) -> int:
        return triton.next_power_of_2(self.group)


def attend_sparsely(
    query: Tensor, keys: StepKeys, *, scale: float, sparsity: Sparsity, sinks: Tensor | None = None,
    tiling: SparseTiling | None = None,
) -> tuple[Tensor, Choice]:  # fmt: skip
    """Compute query (B, H, 1, k + r) -> (B, 1, H, v), and return what was chosen."""
    with torch.cuda.device_of(query):  # Triton launches on the current device
        query, sizes = query.contiguous(), sizes_of(query, keys.kv, sparsity)
        tiling = tiling or tiling_of(sizes, keys.kv)
        coded = encoded(query, keys, sizes, scale, sparsity, tiling)
        estimates = estimated(coded, keys.index, sizes, tiling)
        choice = weighed(estimates, coded, sizes, sparsity, tiling)
        parts = attended(query, keys.kv, choice, sizes, (scale, sparsity.k), tiling)
        return merged(query, parts, sinks, tiling), choice


def sizes_of(query: Tensor, kv: KVCacheView, sparsity: Sparsity) -> Sizes:
    """Return the sizes of a call."""
    B, H, _, _ = query.shape
    K, L = kv.keys.shape[1:3]
    first, second = _parts(kv)
    return Sizes(
        B, H, K, L, K if sparsity.shared else H, first.shape[-1], 0 if second is None else second.shape[-1],
        _LARGEST[sparsity.index][2],
    )  # fmt: skip


def tiling_of(sizes: Sizes, kv: KVCacheView) -> SparseTiling:
    """Return the tiling of a call: by shapes and the GPU alone, so that a captured step has one grid."""
    processors, width = _gpu(kv.keys.device)[0], sizes.first + sizes.second
    wide, lists = width > 256, sizes.batch * sizes.lists
    # measured on an H200: few warps where codes are few, and a product's 16 columns for bits
    block, warps, several, rows = (64, 4, 3, 16) if wide else (64, 1, 7, 8) if sizes.bits == 4 else (128, 4, 4, 16)
    if wide and sizes.bits == 1:
        warps, several = 2, 4
    estimating = several * processors // (sizes.batch * sizes.key_heads)
    attending = (1 if wide else 2) * processors // lists
    row_bytes = (width if kv.rope_keys is not None else 2 * width) * kv.keys.element_size()
    return SparseTiling(
        encode_warps=4, block=block, estimating=max(1, min(-(-sizes.positions // block), estimating)),
        estimate_warps=warps, estimate_stages=3, rows=_wide(sizes.group, rows),
        chunk=1024 if wide else 2048, weigh_warps=8,
        attending=max(1, min(-(-sizes.positions // 512), attending)), strip=32 if wide else 16,
        strips=32 if wide else 64, chosen=64 if row_bytes <= 1024 else 32, attend_warps=4, attend_stages=2,
        merged=32, together=128,
    )  # fmt: skip


def encoded(
    query: Tensor, step: StepKeys, sizes: Sizes, scale: float, sparsity: Sparsity, tiling: SparseTiling
) -> _Coded:
    """Encode the queries and the new key."""
    kv, index, mask = step.kv, step.index, step.mask
    B, H, K, L = sizes.batch, sizes.heads, sizes.key_heads, sizes.positions
    of_query, of_key, bits = _LARGEST[sparsity.index]
    first, second = _parts(kv)
    other = first if second is None else second
    made = kv.keys.new_empty
    coded, factors = made((B, H, query.shape[-1]), dtype=torch.int8), made((B, H), dtype=torch.float32)
    offsets = made((B, H), dtype=torch.int32)
    ends, counts = made((B, 2), dtype=torch.int32), made((B, sizes.lists, _BINS), dtype=torch.int32)
    seen = mask.view(torch.uint8)
    by_row = seen.stride(0) if seen.shape[0] == B and B > 1 else 0
    encode_step[(B, K * (sizes.group + 1) + 1)](
        query, first, other, index.mean, index.signs, step.position, seen, coded, factors, offsets, index.codes,
        index.scales, ends, counts, scale * _LOG2_E, L, by_row, *first.stride()[:3], *other.stride()[:3],
        *index.codes.stride()[:3], *index.scales.stride()[:2], *index.mean.stride()[:2],
        KEY_HEADS=K, HEADS=H, GROUP=sizes.group, LISTS=sizes.lists // K, FIRST=sizes.first, SECOND=sizes.second,
        FIRST_STAGES=sizes.first.bit_length() - 1, SECOND_STAGES=max(0, sizes.second.bit_length() - 1),
        FIRST_SCALE=1 / math.sqrt(sizes.first), SECOND_SCALE=1 / math.sqrt(sizes.second or 1),
        QUERY_LARGEST=of_query, KEY_LARGEST=of_key, BITS=bits, BINS=_BINS, SAMPLES=_SAMPLES,
        STRIDE=_wide(-(-L // _SAMPLES)), num_warps=tiling.encode_warps,
    )  # fmt: skip
    return _Coded(coded, factors, offsets, ends, counts)


def estimated(coded: _Coded, index: StepIndex, sizes: Sizes, tiling: SparseTiling) -> _Estimated:
    """Estimate the scores of all positions."""
    B, H, K, L = sizes.batch, sizes.heads, sizes.key_heads, sizes.positions
    alone, made = sizes.together == 1, coded.factors.new_empty
    scores = made((B, K, L, sizes.padded), dtype=torch.float32 if alone else torch.float16)
    state = made((2, B, H, triton.next_power_of_2(tiling.estimating)))
    estimate[(tiling.estimating, K, B)](
        coded.queries, coded.factors, coded.offsets, index.codes, index.scales, coded.ends, scores,
        state[0], state[1], L, tiling.estimating, *index.codes.stride()[:3], *index.scales.stride()[:2],
        HEADS=H, GROUP=sizes.group, PADDED=sizes.padded, FIRST=sizes.first, SECOND=sizes.second, BITS=sizes.bits,
        ROWS=tiling.rows, BLOCK=tiling.block, ALONE=alone, EVEN=L % tiling.block == 0, STATE=state.shape[-1],
        STAGES=tiling.estimate_stages, num_warps=tiling.estimate_warps,
    )  # fmt: skip
    return _Estimated(scores, state)


def weighed(made: _Estimated, coded: _Coded, sizes: Sizes, sparsity: Sparsity, tiling: SparseTiling) -> Choice:
    """Return the numbers of all positions."""
    numbers = coded.ends.new_empty((sizes.batch, sizes.lists, sizes.positions), dtype=torch.int16)
    weigh[(-(-sizes.positions // tiling.chunk), sizes.lists, sizes.batch)](
        made.scores, made.state[0], made.state[1], coded.ends, numbers, coded.counts,
        math.log2(sizes.together / sparsity.k), sizes.positions, tiling.estimating, sparsity.sink, sparsity.local,
        HEADS=sizes.heads, GROUP=sizes.group, PADDED=sizes.padded, TOGETHER=sizes.together,
        ROWS=triton.next_power_of_2(sizes.together), SELECTORS=sizes.lists, CHUNK=tiling.chunk,
        PROGRAMS=made.state.shape[-1], ALONE=sizes.together == 1, BINS=_BINS, num_warps=tiling.weigh_warps,
    )  # fmt: skip
    return Choice(numbers, coded.counts)


def attended(
    query: Tensor, kv: KVCacheView, choice: Choice, sizes: Sizes, asked: tuple[float, int], tiling: SparseTiling
) -> tuple[Tensor, Tensor]:
    """Return the sums and the states of the parts of attention; `asked` has the scale and `k`."""
    first, second = _parts(kv)
    other = first if second is None else second
    values = first if kv.values is kv.keys and (second is None or kv.rope_keys is not None) else kv.values
    B, H, S, VALUE, programs = sizes.batch, sizes.heads, sizes.lists, values.shape[-1], tiling.attending
    rounds = -(-sizes.positions // (programs * tiling.strip * tiling.strips))
    lists = choice.counts.new_empty((B, S, programs, rounds * tiling.strip * tiling.strips))
    sums = query.new_empty((B * H, programs, VALUE), dtype=torch.float32)
    state = query.new_empty((2, B * H, programs), dtype=torch.float32)
    attend_listed[(programs, S, B)](
        query, first, other, values, choice.numbers, choice.counts, lists, sums, state[0], state[1],
        asked[0] * _LOG2_E, sizes.positions, programs, rounds, asked[1],
        *first.stride()[:3], *other.stride()[:3], *values.stride()[:3],
        HEADS=H, GROUP=sizes.together, SELECTORS=S, OF_KEY_HEAD=S // sizes.key_heads,
        FIRST=sizes.first, SECOND=sizes.second, VALUE=VALUE, FIRST_BLOCK=_wide(sizes.first),
        SECOND_BLOCK=_wide(sizes.second) if sizes.second else 0, VALUE_BLOCK=_wide(VALUE), SHARED=values is first,
        ROWS=_wide(sizes.together), STRIP=tiling.strip, STRIPS=tiling.strips, CHOSEN=tiling.chosen,
        STAGES=tiling.attend_stages, BINS=_BINS, num_warps=tiling.attend_warps,
    )  # fmt: skip
    return sums, state


def merged(query: Tensor, parts: tuple[Tensor, Tensor], sinks: Tensor | None, tiling: SparseTiling) -> Tensor:
    """Add the parts of attention."""
    sums, state = parts
    B, H, _, _ = query.shape
    programs, VALUE = sums.shape[1:]
    out = query.new_empty((B, 1, H, VALUE))
    _merge[(B * H, -(-VALUE // tiling.merged))](
        sums, state[0], state[1], out if sinks is None else sinks.detach().float().contiguous(), out, programs, 1,
        HEADS=H, SEVERAL=False, VALUE=VALUE, SINKS=sinks is not None,
        PROGRAMS=max(_most_programs(query.device), triton.next_power_of_2(programs)), BLOCK=tiling.merged,
        TOGETHER=tiling.together, num_warps=4,
    )  # fmt: skip
    return out


def _wide(width: int, least: int = 16) -> int:
    return max(least, triton.next_power_of_2(width))

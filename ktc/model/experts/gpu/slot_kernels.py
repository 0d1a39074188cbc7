"""Pairs of tokens and experts sorted by expert, by Triton: two passes over the choices and a sum instead of a sort.

In: the router's choice. Out: what `Slots.of` has of it, equal to the bit: equal experts keep their order. A program
has a block of pairs. The first pass counts each block's experts, the second puts a pair behind those of earlier blocks
and of its own block. Importing this needs Triton.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportReturnType=false
# The arguments of device code get their types from Triton, which is not typed itself.

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK: Final = 128  # pairs of a program, each of which is compared with each


class SortedPairs(NamedTuple):
    """See `Slots`; `edges` (E + 1,) int32 are the first slot of each expert, and the number of pairs that have one."""

    tokens: Tensor
    pairs: Tensor
    experts: Tensor
    places: Tensor
    ends: Tensor
    edges: Tensor


def sorted_pairs(index_TK: Tensor, num_experts: int) -> SortedPairs:
    """Sort the pairs by expert, up to the number that `sorts_by_kernel` allows: their numbers have 32 bits.

    Slots beyond the last edge are undefined: of pairs whose expert does not exist.
    """
    index, choices = index_TK.contiguous(), index_TK.shape[1]
    size = index.numel()
    blocks = max(1, triton.cdiv(size, _BLOCK))
    tokens, pairs, experts = (torch.empty(size, dtype=torch.int64, device=index.device) for _ in range(3))
    counts = torch.empty(num_experts * blocks, dtype=torch.int32, device=index.device)
    ends, edges = counts.new_empty(num_experts), counts.new_empty(num_experts + 1)
    places = torch.empty_like(index, dtype=torch.int64)
    sizes = {"LANES": triton.next_power_of_2(num_experts + 1), "BLOCK": _BLOCK, "num_warps": 4}
    with torch.cuda.device_of(index):  # Triton launches on the current device
        _counted[(blocks,)](index, counts, size, num_experts, **sizes)
        upto = counts.cumsum(0, dtype=torch.int32)
        _placed[(blocks,)](
            index, counts, upto, tokens, pairs, experts, places, ends, edges, size, num_experts, choices, **sizes
        )
    return SortedPairs(tokens, pairs, experts, places, ends, edges)


@triton.jit(do_not_specialize=["size"])
def _counted(index, counts, size, experts, LANES: tl.constexpr, BLOCK: tl.constexpr):
    block, blocks, lane = tl.program_id(0), tl.num_programs(0), tl.arange(0, LANES)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(index + pair, mask=pair < size, other=-1).to(tl.int32)
    expert = tl.where((expert >= 0) & (expert < experts), expert, experts)  # the bin after those of experts
    tl.store(counts + lane * blocks + block, tl.histogram(expert, LANES), mask=lane < experts)


@triton.jit(do_not_specialize=["size"])
def _placed(
    index, counts, upto, tokens, pairs, numbers, places, ends, edges, size, experts, choices,
    LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block, blocks, lane = tl.program_id(0), tl.num_programs(0), tl.arange(0, LANES)
    number = tl.arange(0, BLOCK)
    pair = block * BLOCK + number
    expert = tl.load(index + pair, mask=pair < size, other=-1).to(tl.int32)
    there = (expert >= 0) & (expert < experts)
    earlier = (expert[None, :] == expert[:, None]) & (number[None, :] < number[:, None])
    of_block = expert * blocks + block
    place = tl.load(upto + of_block, mask=there, other=0) - tl.load(counts + of_block, mask=there, other=0)
    place += tl.sum(earlier.to(tl.int32), 1)
    tl.store(places + pair, place.to(tl.int64), mask=there)
    tl.store(pairs + place, pair.to(tl.int64), mask=there)
    tl.store(tokens + place, (pair // choices).to(tl.int64), mask=there)
    tl.store(numbers + place, expert.to(tl.int64), mask=there)
    if block == 0:
        end = tl.load(upto + (lane + 1) * blocks - 1, mask=lane < experts, other=0)
        tl.store(ends + lane, end, mask=lane < experts)
        tl.store(edges + lane + 1, end, mask=lane < experts)
        tl.store(edges + lane, tl.zeros_like(end), mask=lane == 0)

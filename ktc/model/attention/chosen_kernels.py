"""Device code of attention over chosen positions: each program lists those of its strips, and attends to them.

Programs have strips in turn, since the last positions, which are all chosen, are neighbours. A program writes
its list to memory, and reads rows of the cache by it.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportReturnType=false
# The arguments of device code get their types from Triton, which is not typed itself.

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from ktc.model.attention.choice_kernels import HIDDEN
from ktc.model.attention.split_kernels import _dot

NOT_SPECIALISED: Final = ("positions", "programs", "rounds", "k")


@triton.jit
def _least_number(counts, k, BINS: tl.constexpr):
    """Return the number of the `k`-th greatest weight, or 1 where fewer compete."""
    bins = tl.arange(0, BINS)
    reached = tl.cumsum(tl.load(counts + bins), 0, reverse=True) >= k
    return tl.max(tl.where(reached, bins, 1), 0)


@triton.jit
def _listed(numbers, lists, least, positions, program, programs, rounds, STRIP: tl.constexpr, STRIPS: tl.constexpr):
    """Write the chosen positions of a program's strips, and return how many these are."""
    flat = tl.arange(0, STRIPS * STRIP)
    place = (flat // STRIP * programs + program) * STRIP + flat % STRIP
    number = tl.load(numbers + place, mask=place < positions, other=HIDDEN)
    chosen = 0
    for _ in range(rounds):
        ahead = place + STRIPS * STRIP * programs
        next_number = tl.load(numbers + ahead, mask=ahead < positions, other=HIDDEN)
        taken = number.to(tl.int32) >= least
        order = tl.cumsum(taken.to(tl.int32), 0)
        tl.store(lists + chosen + order - 1, place, mask=taken)
        chosen += tl.max(order, 0)
        place, number = ahead, next_number
    return chosen


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def attend_listed(
    query, first, second, values, numbers, counts, lists, sums, peaks, totals, scale, positions, programs, rounds, k,
    first_batch, first_head, first_position, second_batch, second_head, second_position,
    value_batch, value_head, value_position,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SELECTORS: tl.constexpr, OF_KEY_HEAD: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, VALUE: tl.constexpr,
    FIRST_BLOCK: tl.constexpr, SECOND_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, SHARED: tl.constexpr,
    ROWS: tl.constexpr, STRIP: tl.constexpr, STRIPS: tl.constexpr, CHOSEN: tl.constexpr, STAGES: tl.constexpr,
    BINS: tl.constexpr,
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
    of_list = row * SELECTORS + selector
    least = _least_number(counts + of_list * BINS, k, BINS)
    lists += (of_list * programs + program) * rounds * STRIPS * STRIP
    chosen = _listed(numbers + of_list * positions, lists, least, positions, program, programs, rounds, STRIP, STRIPS)
    tl.debug_barrier()  # the list is read by other threads of the program
    peak, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.full((ROWS,), 0, tl.float32)
    summed = tl.full((ROWS, VALUE_BLOCK), 0, tl.float32)
    for begin in tl.range(0, chosen, CHOSEN, num_stages=STAGES):
        there = begin + slot < chosen
        at = tl.load(lists + begin + slot, mask=there, other=0).to(tl.int64)
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
        if SHARED:
            v = k1
        else:
            of_values = values + at[:, None] * value_position
            v = tl.load(of_values + dv[None, :], mask=there[:, None] & (dv < VALUE)[None, :], other=0)
        summed = _dot(weights.to(v.dtype), v, summed * faded[:, None])
        peak = new_peak
    part = head * programs + program
    tl.store(peaks + part, peak, mask=is_member)
    tl.store(totals + part, total, mask=is_member)
    tl.store(sums + part[:, None] * VALUE + dv[None, :], summed, mask=is_member[:, None] & (dv < VALUE)[None, :])

"""Requests to a thread of the host and its answers, by Triton: a GPU writes to a mailbox and waits at it.

In and out: memory that host and GPU share, see `Mailbox` in `mailbox.py`. A wait is one small program per piece of the
result, which reads the mailbox until the answer is there, so the rest of the GPU computes meanwhile. Loads of words
that the host writes pass all caches. Importing this needs Triton.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportReturnType=false
# The arguments of device code get their types from Triton, which is not typed itself.

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_SENT: Final = 1 << 15  # words that one program sends
_BLOCK: Final = 2048
_PROGRAMS: Final = 16  # that wait at most
_PARTS: Final = 3


def post(words: Sequence[Tensor], target: Tensor, call: Tensor, done: Tensor, ordered: Tensor, address: int) -> None:
    """Write up to three tensors of int16 to `target`, then 0 to `done` (1,) int32 and an address to `call` (1,) int64.

    `ordered` (1,) int32 is in the memory of the GPU.
    """
    parts = [*words, *(target,) * (_PARTS - len(words))]
    sizes = [*(len(part) for part in words), *(0,) * (_PARTS - len(words))]
    with torch.cuda.device_of(ordered):
        _post[(1,)](*parts, *sizes, target, call, done, ordered, address, BLOCK=_BLOCK, num_warps=8)


def take(out: Tensor, source: Tensor, done: Tensor, failed: Tensor, told: Tensor, most: int) -> None:
    """Wait until `done` (1,) int32 is 1, and copy `source` to `out`, contiguous and of one dtype.

    After `most` looks, 1 is written to `failed` and `told`, (1,) int32 in memory of the GPU and of the host. Where
    `failed` is 1 nothing is waited for.
    """
    programs = min(_PROGRAMS, triton.cdiv(out.numel(), _BLOCK))
    with torch.cuda.device_of(out):
        _take[(programs,)](out, source, done, failed, told, out.numel(), most, BLOCK=_BLOCK, num_warps=8)


@triton.jit
def _sent(source, target, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for begin in range(0, count, BLOCK):
        tl.store(target + begin + at, tl.load(source + begin + at, mask=begin + at < count), mask=begin + at < count)


@triton.jit(do_not_specialize=["of_first", "of_second", "of_third", "address"])
def _post(
    first, second, third, of_first, of_second, of_third, target, call, done, ordered, address, BLOCK: tl.constexpr
):
    _sent(first, target, of_first, BLOCK)
    _sent(second, target + of_first, of_second, BLOCK)
    _sent(third, target + of_first + of_second, of_third, BLOCK)
    tl.store(done, 0)
    tl.debug_barrier()
    tl.atomic_xchg(ordered, 0, sem="acq_rel", scope="sys")  # all of the above is seen before the request
    tl.store(call, address)


@triton.jit(do_not_specialize=["count", "most"])
def _take(out, source, done, failed, told, count, most, BLOCK: tl.constexpr):
    looks = tl.where(tl.load(failed) == 0, 0, most)
    is_done = tl.load(done, volatile=True)
    while (is_done == 0) & (looks < most):
        is_done = tl.load(done, volatile=True)
        looks += 1
    if is_done == 0:
        tl.store(failed, 1)
        tl.store(told, 1)
    tl.debug_barrier()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for begin in range(0, count, BLOCK * tl.num_programs(0)):
        values = tl.load(source + begin + at, mask=begin + at < count, volatile=True)
        tl.store(out + begin + at, values, mask=begin + at < count)

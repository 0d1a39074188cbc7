"""Keys of latent attention from their two parts by one Triton kernel, instead of copies of stock code.

In: expanded latents (B, L, H (n + v)), where each head has its key before its value, and rotary keys (B, 1, L, r), on
one device. Out: keys (B, H, L, n + r) of the latents' dtype, in memory by position. Rotary keys of another dtype are
rounded to it. Importing this needs Triton.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportReturnType=false
# The arguments of device code get their types from Triton, which is not typed itself.

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS: Final = 8  # of a program


def joined(expanded: Tensor, k_rope: Tensor, heads: int, nope: int) -> Tensor:
    """Return the keys of all heads: the first `nope` numbers of a head's part of `expanded`, and the rotary key."""
    B, L, width = expanded.shape
    k_rope = k_rope.to(expanded.dtype)  # by PyTorch: few numbers
    rope = k_rope.shape[-1]
    keys = expanded.new_empty((B, L, heads, nope + rope))
    with torch.cuda.device_of(expanded):  # Triton launches on the current device
        _join[(B * L, triton.cdiv(heads, _HEADS))](
            expanded, k_rope, keys, heads, width // heads, L, *expanded.stride()[:2], k_rope.stride(0),
            k_rope.stride(2), NOPE=nope, ROPE=rope, NOPE_BLOCK=triton.next_power_of_2(nope),
            ROPE_BLOCK=triton.next_power_of_2(rope), HEADS=_HEADS, num_warps=2,
        )  # fmt: skip
    return keys.transpose(1, 2)


@triton.jit(do_not_specialize=("positions",))
def _join(
    expanded, k_rope, keys, heads, width, positions, from_row, from_position, rope_row, rope_position,
    NOPE: tl.constexpr, ROPE: tl.constexpr, NOPE_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Write the keys of some heads at one position."""
    at = tl.program_id(0).to(tl.int64)
    row, position = at // positions, at % positions
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    n, r, there = tl.arange(0, NOPE_BLOCK), tl.arange(0, ROPE_BLOCK), (head < heads)[:, None]
    of_head = expanded + row * from_row + position * from_position + head[:, None] * width
    into = keys + (at * heads + head[:, None]) * (NOPE + ROPE)
    is_nope, is_rope = there & (n < NOPE)[None, :], there & (r < ROPE)[None, :]
    tl.store(into + n[None, :], tl.load(of_head + n[None, :], mask=is_nope), mask=is_nope)
    shared = tl.load(k_rope + row * rope_row + position * rope_position + r, mask=r < ROPE)
    tl.store(into + NOPE + r[None, :], tl.broadcast_to(shared[None, :], (HEADS, ROPE_BLOCK)), mask=is_rope)

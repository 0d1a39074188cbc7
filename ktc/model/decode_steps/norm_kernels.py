"""RMS norms by one Triton kernel, which rounds as stock code does: after the fraction and the product, or once.

In: rows and a weight of one dtype. Out: `weight * (x / sqrt(mean(x^2) + eps))`. Importing this needs Triton.
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

WIDEST: Final = 16384  # numbers of a row that a program holds
_OF_WARP: Final = 512  # numbers of a row for each warp, up to 16 of them


def normed(x: Tensor, weight: Tensor, epsilon: float, *, once: bool = False) -> Tensor:
    """Normalise the last dimension: (..., H), (H,) -> (..., H), contiguous. With `once`, only the product rounds."""
    H = x.shape[-1]
    rows, out = x.reshape(-1, H), x.new_empty(x.shape)
    block = triton.next_power_of_2(H)
    if len(rows):
        with torch.cuda.device_of(x):  # Triton launches on the current device
            _normed[(len(rows),)](
                rows, weight, out, H, rows.stride(0), rows.stride(1), epsilon, ONCE=once, BLOCK=block,
                num_warps=max(1, min(16, block // _OF_WARP)),
            )  # fmt: skip
    return out


@triton.jit
def _normed(x, weight, out, width, by_row, by_number, epsilon, ONCE: tl.constexpr, BLOCK: tl.constexpr):
    kind: tl.constexpr = out.dtype.element_ty
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    value = tl.load(x + row * by_row + d * by_number, mask=d < width, other=0).to(tl.float32)
    factor = tl.load(weight + d, mask=d < width, other=0).to(tl.float32)
    fraction = value * tl.rsqrt(tl.sum(value * value, 0) / width + epsilon)
    if not ONCE:
        fraction = fraction.to(kind).to(tl.float32)
    tl.store(out + row * width + d, (factor * fraction).to(kind), mask=d < width)

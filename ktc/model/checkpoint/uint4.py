"""INT4 with zero points or fp16 scales as blocks that kernels multiply: the format `uint4_g32`, `_g64` or `_g128`.

In: the codes, scales and zero points of a compressed-tensors checkpoint. Out: bytes of blocks as
`ktc.foundation.formats` lays them out. A weight is scale x (code - zero point), exactly; a kernel rounds it to bf16
once.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ZERO_POINT = 0xFF  # the byte of an fp32 scale that holds it


def blocks_of(codes: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Tensor:
    """Return uint8 (rows, bytes of a row): uint8 codes (rows, K), scales and zero points (rows, K / group)."""
    rows = len(codes)
    halves = codes.view(rows, -1, 2, 16)  # of each 32, the first 16 are the lower nibbles
    of_groups = (halves[:, :, 0] | halves[:, :, 1] << 4).view(rows, -1, group // 2)
    return torch.cat((heads(scales, zeros), of_groups), dim=-1).view(rows, -1)


def heads(scales: Tensor, zeros: Tensor) -> Tensor:
    """Return four bytes, uint8 (..., 4), for each scale that fp16 or bf16 holds, and its zero point of 0 to 255."""
    words = scales.float().contiguous().view(torch.int32) | zeros.int()
    return words[..., None].contiguous().view(torch.uint8)


def scales_and_minima(four_bytes: Tensor) -> tuple[Tensor, Tensor]:
    """Return from uint8 (..., 4) the fp32 scales (..., 1), and their products with the zero points."""
    words = four_bytes.contiguous().view(torch.int32)
    scales = (words & ~_ZERO_POINT).view(torch.float32)
    return scales, scales * (words & _ZERO_POINT).float()

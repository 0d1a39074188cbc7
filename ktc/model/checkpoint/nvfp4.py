"""NVFP4 of compressed-tensors and NVIDIA ModelOpt as blocks that kernels multiply: the format `nvfp4`.

In: the codes of a checkpoint, two in a byte, E4M3 scales for each 16 of a row, and the fp32 scale of the matrix. Out:
bytes of blocks as `ktc.foundation.formats` lays them out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # quick errors read headers of checkpoints without torch
    from torch import Tensor

GROUP = 16
_BLOCK = 32


def blocks_of(codes: Tensor, scales: Tensor, matrix: Tensor) -> Tensor:
    """Return uint8 (rows, bytes of a row): codes (rows, K / 2), E4M3 scales (rows, K / 16), K whole blocks of 32."""
    import torch

    rows = len(codes)
    pairs = codes.view(rows, -1, _BLOCK // 2)
    in_order = torch.stack((pairs & 0xF, pairs >> 4), dim=-1).flatten(2)
    together = in_order[..., :16] | in_order[..., 16:] << 4
    half = (matrix.float() / 2).reshape(1).view(torch.uint8).expand(*pairs.shape[:2], 4)
    eights = scales.view(torch.uint8).view(rows, -1, _BLOCK // GROUP)
    return torch.cat((half, eights, together), dim=-1).view(rows, -1)


def matrix_scale(stored: Tensor, *, divides: bool) -> Tensor:
    """Return the fp32 scale of a matrix; checkpoints of compressed-tensors have its inverse, which `divides`."""
    value = stored.float().reshape(())
    return 1 / value if divides else value

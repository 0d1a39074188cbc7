"""Symmetric INT4 with a scale per group of columns: the quantiser, its packing, and its gradient for training.

In: matrices (rows, K) of bf16, fp16 or fp32; the columns of a group, or all of a row (-1). Out: codes from -7 to 7 and
scales in the weights' dtype. A weight is its code times its scale, rounded once in that dtype, as compressed-tensors
decompresses it: training with `fake_quantised` and inference from the packed codes see the same bits. The scale is
rounded before the codes are chosen, so quantising again changes neither (`scale_first`). `slime` keeps scales in fp32
for the codes and the product, as the trainer of that name does, for replication.
Refused (`ValueError`): columns that groups do not divide, and values that are not finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ScaleMode = Literal["scale_first", "slime"]
SCALE_MODES: Final[tuple[ScaleMode, ...]] = ("scale_first", "slime")
WHOLE_ROW: Final = -1
LARGEST: Final = 7
_SMALLEST_SCALE: Final = 1e-5  # of a group of zeros
_PER_WORD: Final = 8


@dataclass(frozen=True, slots=True)
class Int4:
    """`codes` (rows, K) int8 in [-7, 7] and `scales` (rows, groups), of groups of `group` columns."""

    codes: Tensor
    scales: Tensor
    group: int

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix (rows, K): products in the dtype of the scales, then rounded to `dtype`."""
        rows, columns = self.codes.shape
        grouped = self.codes.view(rows, -1, self.group).to(self.scales.dtype) * self.scales.unsqueeze(-1)
        return grouped.view(rows, columns).to(dtype)


@dataclass(frozen=True, slots=True)
class Int4Grid:
    """The values that INT4 weights can have: the columns that share a scale (-1: a row), and how it is rounded."""

    group: int
    scale_mode: ScaleMode = "scale_first"

    def __str__(self) -> str:
        return f"int4 {self.group} {self.scale_mode}"

    @classmethod
    def parse(cls, text: str | None) -> Int4Grid | None:
        """Return the grid that `str` writes, `None` for "" or None. Raises `ValueError` for another text."""
        if not text:
            return None
        name, group, mode = (*text.split(), "", "")[:3]
        scale_mode: ScaleMode | None = next((known for known in SCALE_MODES if known == mode), None)
        if name != "int4" or scale_mode is None or str(cls(int(group), scale_mode)) != text:
            raise ValueError(f"`{text}` names no grid of INT4")
        return cls(int(group), scale_mode)

    def rounded(self, weight: Tensor) -> Tensor:
        """Return weights (..., K) on the grid, in their dtype, with the straight-through gradient."""
        return fake_quantised(weight.reshape(-1, weight.shape[-1]), self.group, self.scale_mode).view(weight.shape)

    def coded(self, matrix: Tensor) -> Int4:
        return quantised(matrix, self.group, self.scale_mode)


def quantised(weight: Tensor, group: int, scale_mode: ScaleMode = "scale_first") -> Int4:
    """Return codes and scales of a matrix. Weights wider than bf16 are rounded to it first, `scale_first` alone."""
    rows, columns = weight.shape
    size = columns if group == WHOLE_ROW else group
    if size < 1 or columns % size:
        raise ValueError(f"groups of {size} do not divide {columns} columns")
    rounds_first = weight.dtype.itemsize > 2 and scale_mode == "scale_first"
    stored = torch.bfloat16 if rounds_first else weight.dtype
    values = weight.detach().to(stored).float().view(rows, -1, size)
    greatest = values.abs().amax(-1)
    if not bool(torch.isfinite(greatest).all()):
        raise ValueError("a weight is not finite")
    scales = (greatest / LARGEST).clamp(min=_SMALLEST_SCALE)
    if scale_mode == "scale_first":
        scales = scales.to(stored)
    codes = torch.round(values / scales.float().unsqueeze(-1)).clamp(-LARGEST, LARGEST)
    return Int4(codes.to(torch.int8).view(rows, columns), scales, size)


def fake_quantised(weight: Tensor, group: int, scale_mode: ScaleMode = "scale_first") -> Tensor:
    """Return the weight that INT4 stores, in the dtype of `weight`. Its gradient passes to `weight` unchanged."""
    return cast("Tensor", _StraightThrough.apply(weight, group, scale_mode))


class _StraightThrough(torch.autograd.Function):
    """Straight-through estimator: y = quantised(w), dL/dw = dL/dy (Bengio et al., arXiv:1308.3432)."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: int, scale_mode: ScaleMode) -> Tensor:
        return quantised(weight, group, scale_mode).weight(weight.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None, None


def packed(codes: Tensor) -> Tensor:
    """Return codes (rows, K) as int32 words (rows, ceil(K / 8)), the first of eight in the lowest four bits.

    Codes are stored plus 8; a last word that is not full ends with zeros. This is `pack-quantized` of
    compressed-tensors.
    """
    rows, columns = codes.shape
    words = -(-columns // _PER_WORD)
    unsigned = torch.zeros(rows, words * _PER_WORD, dtype=torch.uint8, device=codes.device)
    unsigned[:, :columns] = codes.view(torch.uint8) + 8  # wraps: -8 to 7 are 0 to 15
    low, high = unsigned.view(rows, -1, 2).unbind(-1)
    return (low | high << 4).view(torch.int32)  # little-endian: the first byte has the first two codes


def unpacked(words: Tensor, columns: int) -> Tensor:
    """Return the codes (rows, columns), int8, of packed words."""
    return nibbles(words)[:, :columns] - 8


def nibbles(words: Tensor) -> Tensor:
    """Return the unsigned 4-bit codes in the bytes of each row (rows, ...), lowest bits first, as int8."""
    pairs = words.view(torch.uint8)
    return torch.stack((pairs & 0xF, pairs >> 4), dim=-1).view(torch.int8).view(pairs.shape[0], -1)

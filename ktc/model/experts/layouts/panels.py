"""Panels of packed weights as PyTorch reads them: the bits of every format, decoded on the device that holds them.

In: bytes of panels. Out: their weights in the dtype that is multiplied. A panel has 32 outputs; 32 weights of each are
a block. The headers in `runtime/include/ktc/weight_format` define the order of the bits, the rows of
`ktc/foundation/formats.py` the meaning of codes and scales. Kernels decode to the same bits, which tests compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol, cast

import torch
from torch import Tensor

from ktc.foundation.formats import (
    FORMATS,
    POWERS,
    Blocks,
    BlockScales,
    Codes,
    Dense,
    Exponent,
    Float8Scales,
    ScaleAndZero,
    WeightFormat,
)
from ktc.model.checkpoint.uint4 import scales_and_minima

WIDTH: Final = 32  # outputs of a panel, and weights of each output in a block
_BLOCK: Final = WIDTH * WIDTH
_DTYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
_DEPTHS: Final = {torch.bfloat16: 2, torch.float32: 1, torch.float64: 1}  # neighbours of the contraction side by side
_HALVES: Final = 2 * WIDTH  # bytes of one fp16 value for each output
_LINE: Final = 2 * WIDTH  # bytes of a word for each output


class Panels(Protocol):
    """The panels of one format. `columns`, the length of the contraction, is a multiple of 32."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        ...

    def nbytes(self, columns: int) -> int:
        """Count the bytes of one panel."""
        ...

    def steps(self, panels: Tensor, columns: int) -> Tensor:
        """Return the weights of panels in the order in which they are stored.

        uint8 (..., bytes of one) -> (..., steps, 32 outputs, neighbours): a step is that many columns, and there may
        be more columns than `columns`.
        """
        ...


def by_output(steps: Tensor, columns: int) -> Tensor:
    """Return the rows of panels, (..., steps, outputs, neighbours) -> (..., outputs, columns)."""
    return steps.transpose(-3, -2).flatten(-2)[..., :columns]


def panels_of(stored: WeightFormat, group: int = 0) -> Panels:
    """Return the panels of a format; `group` is the size of its groups, where the format has several."""
    row = FORMATS[stored]
    match row:
        case Dense():
            return DensePanels(_DTYPES[row.computes])
        case Codes(integer_products=True):
            return RowPanels(row)
        case Codes():
            return GroupPanels(row, group)
        case Blocks():
            return BlockPanels(row)
        case _:
            raise ValueError(f"`{stored}` has no panels")


@dataclass(frozen=True, slots=True)
class DensePanels:
    """Plain values."""

    dtype: torch.dtype

    def nbytes(self, columns: int) -> int:
        """Count the bytes of one panel."""
        return WIDTH * columns * self.dtype.itemsize

    def steps(self, panels: Tensor, columns: int) -> Tensor:
        """See `Panels.steps`."""
        depth = _DEPTHS[self.dtype]
        return cut(panels.view(self.dtype), -1, columns // depth, WIDTH, depth)


@dataclass(frozen=True, slots=True)
class RowPanels:
    """int8: [scales][offsets][codes], four neighbours of the contraction side by side, in tiles of 64 columns."""

    row: Codes
    dtype = torch.bfloat16

    def nbytes(self, columns: int) -> int:
        """Count the bytes of one panel."""
        return WIDTH * (self.row.scale_bytes + -(-columns // self.row.unit) * self.row.unit)

    def steps(self, panels: Tensor, columns: int) -> Tensor:
        """See `Panels.steps`."""
        scales = panels[..., : 4 * WIDTH].view(torch.float32)
        codes = cut(panels[..., WIDTH * self.row.scale_bytes :].view(torch.int8), -1, -1, WIDTH, 4)
        return (codes.float() * scales[..., None, :, None]).to(self.dtype)


@dataclass(frozen=True, slots=True)
class GroupPanels:
    """int4, fp8: for each group of columns [scales][blocks of codes]; the last group may be shorter."""

    row: Codes
    group: int
    dtype = torch.bfloat16

    @property
    def _head(self) -> int:
        return WIDTH * self.row.scale_bytes

    def nbytes(self, columns: int) -> int:
        """Count the bytes of one panel."""
        return -(-columns // self.group) * self._head + WIDTH * columns * self.row.bits // 8

    def steps(self, panels: Tensor, columns: int) -> Tensor:
        """See `Panels.steps`."""
        whole = columns // self.group
        end = whole * self.nbytes(self.group)
        parts = [self._steps(cut(panels[..., :end], -1, whole, -1))] if whole else []
        if columns % self.group:
            parts.append(self._steps(panels[..., None, end:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -3)

    def _steps(self, groups: Tensor) -> Tensor:
        """(..., groups, bytes of one) -> (..., steps, 32 outputs, 2)."""
        scales = groups[..., : self._head].view(torch.bfloat16 if self.row.bf16_scales else torch.float32).float()
        codes = groups[..., self._head :]
        if self.row.float8:
            numbers = codes.view(torch.float8_e4m3fn).float()
        else:
            numbers = _fields(codes, self.row.bits).float() - 2 ** (self.row.bits - 1)
        return (cut(numbers, -1, -1, WIDTH, 2) * scales[..., None, :, None]).to(self.dtype).flatten(-4, -3)


@dataclass(frozen=True, slots=True)
class BlockPanels:
    """Blocks of a GGUF file: for each span of them [scales][codes]."""

    row: Blocks
    dtype = torch.bfloat16

    @property
    def _span(self) -> int:
        """The blocks of 32 weights in a span."""
        return max(1, self.row.span * self.row.weights // WIDTH)

    @property
    def _head(self) -> int:
        return WIDTH * self.row.head

    def nbytes(self, columns: int) -> int:
        """Count the bytes of one panel."""
        return -(-columns // (WIDTH * self._span)) * (self._head + self._span * _BLOCK * self.row.bits // 8)

    def steps(self, panels: Tensor, columns: int) -> Tensor:
        """See `Panels.steps`."""
        spans = cut(panels, -1, -1, self.nbytes(WIDTH * self._span))
        codes = cut(spans[..., self._head :], -1, self._span, -1)
        if self.row.scales is None:
            return cut(codes.view(torch.float16), -1, -1, WIDTH, 2).to(self.dtype).flatten(-5, -3)
        scales, least = self._scales(spans[..., : self._head], self.row.scales)
        weights = cut(self._numbers(codes), -1, scales.shape[-2], -1, WIDTH, 2) * scales[..., None, :, None]
        if least is not None:
            weights = weights - least[..., None, :, None]
        return weights.to(self.dtype).flatten(-6, -3)

    def _numbers(self, codes: Tensor) -> Tensor:
        """Return the values of a block's codes, (..., bytes) -> (..., 1024) in fp32."""
        numbers = self.row.numbers
        if self.row.bits == 8:
            return codes.view(torch.int8).float()
        codes_of_block = _fields(codes, 4) if self.row.bits == 4 else _split_fields(codes, self.row.bits - 4)
        if numbers == tuple(range(numbers[0], numbers[0] + len(numbers))):
            return codes_of_block.float() + numbers[0]
        return torch.tensor(numbers, dtype=torch.float32, device=codes.device)[codes_of_block.long()]

    def _scales(self, head: Tensor, scales: BlockScales) -> tuple[Tensor, Tensor | None]:
        """Return (..., blocks, scales of one, 32 outputs) and the same of the minima, in fp32."""
        if isinstance(scales, Exponent):
            powers = torch.tensor(POWERS, dtype=torch.float32, device=head.device)
            return powers[cut(head, -1, self.row.span, 1, WIDTH).long()], None
        if isinstance(scales, ScaleAndZero):
            of_lanes = scales_and_minima(cut(head, -1, WIDTH, 4))
            scale, least = (value.transpose(-1, -2)[..., None, :, :] for value in of_lanes)
            return scale, least
        if isinstance(scales, Float8Scales):
            matrix = head[..., : self.row.shared * WIDTH].view(torch.float32)[..., None, None, :]
            eights = head[..., self.row.shared * WIDTH :].contiguous().view(torch.float8_e4m3fn).float()
            return cut(eights, -1, self.row.span, -1, WIDTH) * matrix, None
        scale = head[..., :_HALVES].view(torch.float16).float()[..., None, None, :]
        least = None
        planes = head[..., _HALVES:]
        if scales.minimum is not None:
            least = planes[..., :_HALVES].view(torch.float16).float()[..., None, None, :]
            planes = planes[..., _HALVES:]
        if scales.factors is not None:
            return scale * cut(planes.view(torch.int8).float(), -1, self._span, -1, WIDTH), least
        if scales.sixes is None or least is None:
            return scale, least
        for_scale, for_least, lower = cut(planes, -1, 3, 4, WIDTH).unbind(-3)
        of_scale = torch.cat((for_scale & 63, lower & 15 | for_scale >> 2 & 48), -2)
        of_least = torch.cat((for_least & 63, lower >> 4 | for_least >> 2 & 48), -2)
        return scale * of_scale.float()[..., None, :], least * of_least.float()[..., None, :]


def cut(tensor: Tensor, dim: int, *sizes: int) -> Tensor:
    """Return `tensor` with one dimension cut into several; one of `sizes` may be -1."""
    return cast("Tensor", tensor.unflatten(dim, sizes))


def _fields(packed: Tensor, bits: int) -> Tensor:
    """Return codes of a few bits, (..., bytes) -> (..., codes): each shift of a line of 32 words is 32 codes."""
    words = cut(packed.view(torch.int16), -1, -1, 1, WIDTH)
    shifts = torch.arange(0, 16, bits, dtype=torch.int16, device=packed.device)[:, None]
    return (words >> shifts & (1 << bits) - 1).flatten(-3)


def _split_fields(packed: Tensor, high_bits: int) -> Tensor:
    """Return codes of five or six bits, (..., bytes) -> (..., codes): lines of lower bits before one of upper bits.

    Upper bits are in the byte of a word that has their lower bits (`high_shift` in `weight_format/blocks.hpp`).
    """
    vectors = torch.arange(16 // high_bits, dtype=torch.int16, device=packed.device)[:, None]
    units = cut(packed, -1, -1, len(vectors) // 4 + 1, _LINE)
    shifts = vectors % 4 // 2 * 8 + (vectors // 4 * 2 + vectors % 2) * high_bits
    upper = units[..., -1, :].contiguous().view(torch.int16)[..., None, :] >> shifts & (1 << high_bits) - 1
    return (_fields(units[..., :-1, :].flatten(-2), 4) | (upper << 4).flatten(-2)).flatten(-2)

"""The scales of blocks in PyTorch: read, written, drawn at random, and checked, for every kind in `formats.py`.

In: uint8 blocks (blocks, bytes of one) and their row of `ktc/foundation/formats.py`. Out: fp32 scales (blocks, scales
of one), and minima of the same shape, where a format has them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from ktc.foundation.formats import POWERS, Blocks, Exponent, Float8Scales, Halves, ScaleAndZero
from ktc.model.checkpoint import uint4

_SIX, _BYTE = 32.0, 74.0  # about the mean of random factors of 6 bits, and the root mean square of signed bytes
_LARGE_EXPONENT: Final = 251  # from here on, 12 times the scale of an MXFP4 block exceeds fp32
_LARGE_SCALE: Final = 2.0**110  # of a matrix: 448 x 12 times as much is finite


def scales_of(blocks: Tensor, row: Blocks) -> tuple[Tensor, Tensor | None]:
    """Return the scales of blocks, and their minima or None."""
    match row.scales:
        case Exponent(at=at):
            return torch.tensor(POWERS, dtype=torch.float32)[blocks[:, at : at + 1].long()], None
        case ScaleAndZero(at=at):
            return uint4.scales_and_minima(blocks[:, at : at + 4])
        case Float8Scales(at=at, matrix=matrix):
            return _float8(blocks, at, row.weights) * _float32(blocks, matrix), None
        case Halves() as halves:
            return _halves(blocks, halves)
        case None:
            raise ValueError(f"`{row.name}` has no scales")


def put_scales(blocks: Tensor, row: Blocks, scale: Tensor, minimum: Tensor | None) -> None:
    """Write what `row.quantise` returns into blocks. Formats that are only read have no such scales."""
    match row.scales:
        case Exponent(at=at):
            blocks[:, at : at + 1] = scale.to(torch.uint8)
        case Halves(scale=at, minimum=minimum_at):
            blocks[:, at : at + 2] = half_bytes(scale)
            if minimum is not None and minimum_at is not None:
                blocks[:, minimum_at : minimum_at + 2] = half_bytes(minimum)
        case Float8Scales(at=at, matrix=matrix):
            blocks[:, matrix : matrix + 4] = scale[:, :1].contiguous().view(torch.uint8)
            blocks[:, at : at + scale.shape[1] - 1] = scale[:, 1:].to(torch.float8_e4m3fn).view(torch.uint8)
        case ScaleAndZero() | None:
            pass


def put_random_scales(blocks: Tensor, row: Blocks, scale: float, generator: torch.Generator) -> None:
    """Write finite scales, with which random codes are weights about as large as `scale`."""
    count = len(blocks)
    size = math.sqrt(sum(number**2 for number in row.numbers) / len(row.numbers))
    match row.scales:
        case Exponent(at=at):
            around = math.floor(math.log2(scale / size)) + 128
            blocks[:, at] = torch.randint(around, around + 2, (count,), generator=generator)
        case ScaleAndZero(at=at):
            of_block = torch.rand(count, generator=generator).add(0.5).mul(scale / size).bfloat16().float()
            zeros = torch.randint(16, (count,), dtype=torch.int32, generator=generator)
            blocks[:, at : at + 4] = uint4.heads(of_block, zeros)
        case Float8Scales():
            groups = row.weights // 16
            eights = torch.rand(count, groups, generator=generator).add(0.5).mul(8).to(torch.float8_e4m3fn)
            put_scales(blocks, row, torch.cat([torch.full((count, 1), scale / size / 8), eights.float()], 1), None)
        case Halves() as halves:
            for place, value in _half_sizes(halves, scale / size, sum(row.numbers) / len(row.numbers)):
                of_block = torch.rand(count, 1, generator=generator).add(0.5).mul(value)
                blocks[:, place : place + 2] = half_bytes(of_block)
        case None:
            pass


def suspects(blocks: Tensor, row: Blocks) -> Tensor | None:
    """Return the blocks that may have a weight that is not finite, by their scales; None if one surely is not."""
    match row.scales:
        case Halves(scale=scale, minimum=minimum):
            places = (scale,) if minimum is None else (scale, minimum)
            finite = all(bool(_half(blocks, place).isfinite().all()) for place in places)
        case Exponent(at=at):
            return blocks[blocks[:, at] >= _LARGE_EXPONENT]
        case ScaleAndZero(at=at):
            finite = bool(uint4.scales_and_minima(blocks[:, at : at + 4])[0].isfinite().all())
        case Float8Scales(at=at, matrix=matrix):
            finite = bool((blocks[:, at : at + row.weights // 16] & 127 != 127).all())  # 127: NaN
            finite = finite and bool((_float32(blocks, matrix).abs() < _LARGE_SCALE).all())
        case None:
            return blocks
    return blocks[:0] if finite else None


def half_bytes(values: Tensor) -> Tensor:
    """Return the two bytes of each value in fp16."""
    return values.half().view(torch.uint8)


def _half(blocks: Tensor, at: int) -> Tensor:
    """(blocks, 1) values of two bytes each."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _float8(blocks: Tensor, at: int, weights: int) -> Tensor:
    """(blocks, scales of a block) values of a byte each."""
    return blocks[:, at : at + weights // 16].contiguous().view(torch.float8_e4m3fn).float()


def _float32(blocks: Tensor, at: int) -> Tensor:
    """(blocks, 1) values of four bytes each."""
    return blocks[:, at : at + 4].contiguous().view(torch.float32)


def _halves(blocks: Tensor, scales: Halves) -> tuple[Tensor, Tensor | None]:
    scale = _half(blocks, scales.scale)
    least = None if scales.minimum is None else _half(blocks, scales.minimum)
    least = -least if least is not None and scales.added else least
    if scales.factors is not None:
        return scale * blocks[:, scales.factors : scales.factors + 16].contiguous().view(torch.int8).float(), least
    if scales.sixes is None or least is None:
        return scale, least
    for_scale, for_min, lower = (blocks[:, at : at + 4] for at in range(scales.sixes, scales.sixes + 12, 4))
    of_scale = torch.cat((for_scale & 63, lower & 15 | for_scale >> 2 & 48), 1)
    of_min = torch.cat((for_min & 63, lower >> 4 | for_min >> 2 & 48), 1)
    return scale * of_scale.float(), least * of_min.float()


def _half_sizes(scales: Halves, size: float, mean: float) -> Iterator[tuple[int, float]]:
    """Yield the offsets of a block's fp16 scale and minimum, and values for weights of about `size` around zero."""
    factor = _SIX if scales.sixes is not None else _BYTE if scales.factors is not None else 1.0
    yield scales.scale, size / factor
    if scales.minimum is not None:
        yield scales.minimum, (-mean if scales.added else mean) * size / factor

"""GGUF blocks in plain PyTorch: the weights in them, and the blocks for given weights.

In: bytes (rows, bytes of a row) of whole blocks, or weights (rows, columns); the row of `ktc/foundation/formats.py`
says where a block has its codes and scales. The C++ of `runtime/include/ktc/weight_format` must agree to the last bit,
and both with the package `gguf`. Refused: weights that are not finite, and formats that are only read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ktc.foundation.formats import BLOCKS, POWERS, Blocks, CodeBits, Exponent, Halves, ScaleAndZero
from ktc.model.checkpoint import uint4

_SIX, _BYTE = 32.0, 74.0  # about the mean of random factors of 6 bits, and the root mean square of signed bytes


def dequantise_blocks(blocks: Tensor, name: str) -> Tensor:
    """Return the fp32 weights (rows, columns) in uint8 blocks of the weight format `name`."""
    row = BLOCKS[name]
    rows = blocks.reshape(-1, row.block_bytes)
    weights = _weights(rows, row) if row.scales else _half(rows, 0)
    return weights.reshape(blocks.shape[0], -1)


def quantise_blocks(weights: Tensor, name: str) -> Tensor:
    """Return uint8 blocks (rows, bytes of a row) for weights whose rows are whole blocks."""
    if not bool(weights.isfinite().all()):
        raise ValueError("weights that are not finite cannot be quantised")
    row = BLOCKS[name]
    if not row.quantises:
        raise ValueError(f"{name} weights are taken only as a file stores them")
    if row.quantise is None:
        return _half_bytes(weights)
    scale, minimum, codes = row.quantise(weights.float().reshape(-1, row.weights))
    blocks = torch.zeros(len(scale), row.block_bytes, dtype=torch.uint8)
    match row.scales:
        case Exponent(at=at):
            blocks[:, at : at + 1] = scale.to(torch.uint8)
        case Halves(scale=at, minimum=minimum_at):
            blocks[:, at : at + 2] = _half_bytes(scale)
            if minimum is not None and minimum_at is not None:
                blocks[:, minimum_at : minimum_at + 2] = _half_bytes(minimum)
        case ScaleAndZero() | None:
            pass
    for place, packed in _packed(codes.to(torch.uint8), row):
        blocks[:, place : place + packed.shape[1]] = packed
    return blocks.reshape(weights.shape[0], -1)


def random_blocks(rows: int, columns: int, name: str, scale: float, generator: torch.Generator) -> Tensor:
    """Return blocks of random codes with finite scales, whose weights are about as large as `scale`."""
    row = BLOCKS[name]
    if row.scales is None:
        return _half_bytes(torch.randn(rows, columns, generator=generator) * scale)
    count = rows * columns // row.weights
    blocks = torch.randint(256, (count, row.block_bytes), dtype=torch.uint8, generator=generator)
    size = math.sqrt(sum(number**2 for number in row.numbers) / len(row.numbers))
    if isinstance(row.scales, Exponent):
        around = math.floor(math.log2(scale / size)) + 128
        blocks[:, row.scales.at] = torch.randint(around, around + 2, (count,), generator=generator)
        return blocks.view(rows, -1)
    if isinstance(row.scales, ScaleAndZero):
        of_block = torch.rand(count, generator=generator).add(0.5).mul(scale / size).bfloat16().float()
        zeros = torch.randint(16, (count,), dtype=torch.int32, generator=generator)
        blocks[:, row.scales.at : row.scales.at + 4] = uint4.heads(of_block, zeros)
        return blocks.view(rows, -1)
    for place, value in _half_sizes(row.scales, scale / size, sum(row.numbers) / len(row.numbers)):
        of_block = torch.rand(count, 1, generator=generator).add(0.5).mul(value)
        blocks[:, place : place + 2] = _half_bytes(of_block)
    return blocks.view(rows, -1)


def _half_sizes(scales: Halves, size: float, mean: float) -> Iterator[tuple[int, float]]:
    """Yield the offsets of a block's fp16 scale and minimum, and values for weights of about `size` around zero."""
    factor = _SIX if scales.sixes is not None else _BYTE if scales.factors is not None else 1.0
    yield scales.scale, size / factor
    if scales.minimum is not None:
        yield scales.minimum, (-mean if scales.added else mean) * size / factor


def _weights(blocks: Tensor, row: Blocks) -> Tensor:
    """(blocks, scales of a block, weights of a scale)."""
    numbers = torch.tensor(row.numbers, dtype=torch.float32)[_codes(blocks, row).long()]
    if isinstance(row.scales, Exponent):
        return torch.tensor(POWERS, dtype=torch.float32)[blocks[:, row.scales.at].long()][:, None] * numbers
    assert row.scales is not None, "only a value has no scales"
    if isinstance(row.scales, ScaleAndZero):
        scale, least = uint4.scales_and_minima(blocks[:, row.scales.at : row.scales.at + 4])
    else:
        scale, least = _scales_and_mins(blocks, row.scales)
    product = scale[..., None] * numbers.view(*scale.shape, -1)
    return product if least is None else product - least[..., None]


def _scales_and_mins(blocks: Tensor, scales: Halves) -> tuple[Tensor, Tensor | None]:
    """(blocks, scales of a block) each."""
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


def _codes(blocks: Tensor, row: Blocks) -> Tensor:
    """(blocks, weights), joined of their parts from the lowest bits on."""
    codes, up = torch.zeros(len(blocks), 1, dtype=torch.uint8), 0
    for part in row.codes:
        packed = blocks[:, part.at : part.at + row.weights * part.bits // 8].reshape(len(blocks), -1, 1, part.run)
        bits = packed >> _shifts(part) & (1 << part.bits) - 1
        codes = codes | bits.reshape(len(blocks), -1) << up
        up += part.bits
    return codes


def _packed(codes: Tensor, row: Blocks) -> Iterator[tuple[int, Tensor]]:
    """Yield the offset of each part of the codes and its bytes (blocks, bytes): the inverse."""
    up = 0
    for part in row.codes:
        bits = codes >> up & (1 << part.bits) - 1
        bytes_ = bits.reshape(len(codes), -1, 8 // part.bits, part.run) << _shifts(part)
        yield part.at, bytes_.sum(2).to(torch.uint8).reshape(len(codes), -1)
        up += part.bits


def _shifts(part: CodeBits) -> Tensor:
    return torch.arange(0, 8, part.bits, dtype=torch.uint8).view(-1, 1)


def _half(blocks: Tensor, at: int) -> Tensor:
    """(blocks, 1) values of two bytes each."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _half_bytes(values: Tensor) -> Tensor:
    return values.half().view(torch.uint8)

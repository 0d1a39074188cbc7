"""GGUF blocks in plain PyTorch: the weights in them, and the blocks for given weights.

In: bytes (rows, bytes of a row) of whole blocks, or weights (rows, columns); the row of `ktc/foundation/formats.py`
says where a block has its codes and scales. The C++ of `runtime/include/ktc/weight_format` must agree to the last bit,
and both with the package `gguf`. Refused: weights that are not finite, and formats that are only read.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ktc.foundation.formats import BLOCKS, Blocks, CodeBits
from ktc.model.checkpoint.block_scales import half_bytes, put_random_scales, put_scales, scales_of


def dequantise_blocks(blocks: Tensor, name: str) -> Tensor:
    """Return the fp32 weights (rows, columns) in uint8 blocks of the weight format `name`."""
    row = BLOCKS[name]
    rows = blocks.reshape(-1, row.block_bytes)
    weights = _weights(rows, row) if row.scales else rows.view(torch.float16).float()
    return weights.reshape(blocks.shape[0], -1)


def quantise_blocks(weights: Tensor, name: str) -> Tensor:
    """Return uint8 blocks (rows, bytes of a row) for weights whose rows are whole blocks."""
    if not bool(weights.isfinite().all()):
        raise ValueError("weights that are not finite cannot be quantised")
    row = BLOCKS[name]
    if not row.quantises:
        raise ValueError(f"{name} weights are taken only as a file stores them")
    if row.quantise is None:
        return half_bytes(weights)
    scale, minimum, codes = row.quantise(weights.float().reshape(-1, row.weights))
    blocks = torch.zeros(len(scale), row.block_bytes, dtype=torch.uint8)
    put_scales(blocks, row, scale, minimum)
    for place, packed in _packed(codes.to(torch.uint8), row):
        blocks[:, place : place + packed.shape[1]] = packed
    return blocks.reshape(weights.shape[0], -1)


def random_blocks(rows: int, columns: int, name: str, scale: float, generator: torch.Generator) -> Tensor:
    """Return blocks of random codes with finite scales, whose weights are about as large as `scale`."""
    row = BLOCKS[name]
    if row.scales is None:
        return half_bytes(torch.randn(rows, columns, generator=generator) * scale)
    count = rows * columns // row.weights
    nbytes = count * row.block_bytes
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (-(-nbytes // 8),), generator=generator)  # a draw for eight bytes
    blocks = words.view(torch.uint8)[:nbytes].view(count, row.block_bytes)
    put_random_scales(blocks, row, scale, generator)
    return blocks.view(rows, -1)


def _weights(blocks: Tensor, row: Blocks) -> Tensor:
    """(blocks, scales of a block, weights of a scale)."""
    numbers = torch.tensor(row.numbers, dtype=torch.float32)[_codes(blocks, row).long()]
    scale, least = scales_of(blocks, row)
    product = scale[..., None] * numbers.view(*scale.shape, -1)
    return product if least is None else product - least[..., None]


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

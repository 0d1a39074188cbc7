"""Keys as codes of few bits, and scores estimated from them: the reference of the kernel, bit for bit.

In: keys (B, K, L, k), queries (B, H, T, k). Out: `Codes`, and estimated scores (B, H, T, L). A key is centred by a
fixed mean, which adds one number to all scores of a query and so changes no softmax, and rotated by Hadamard matrices
with fixed signs, which spread outlying channels over all of them (QuaRot, Ashkboos et al. 2024). Its numbers are then
rounded to 4 bits with one scale in fp16, or to their signs. A rotated query has codes of 8 bits, or of 5 bits beside
signs, so that products of codes are integers, equal on every machine.

Symbols: B sequences, K key heads, H query heads, T new tokens, L positions, N blocks of 16 positions.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from ktc.model.attention.sparsity import TOKENS, IndexFormat, block_bytes, groups

_LARGEST: Final = {"int4": 7, "sign": 1}  # of a key's codes
_QUERY_LARGEST: Final = {"int4": 127, "sign": 15}  # sums of four codes of 5 bits are bytes, so tables can hold them
_CHUNK: Final = 4096  # positions whose codes are computed together


@dataclass(frozen=True, slots=True)
class Codes:
    """The codes of `positions` keys: bytes (B, K, N, `block_bytes`) and scales (B, K, 16 N) in fp16.

    A block holds 16 positions. In int4, eight neighbours of a key are four bytes, whose low halves have the first four.
    In sign, 32 neighbours are four bytes, whose lowest bits have the first four, and so on. These of all 16 positions
    follow each other, then the next neighbours.
    """

    blocks: Tensor
    scales: Tensor


@functools.cache
def signs(width: int) -> Tensor:
    """Return the fixed signs (width,) in fp32, those of the bits of a multiplicative sequence (Knuth, TAOCP 3.3.4)."""
    state, numbers = 0x2545F4914F6CDD1D, list[float]()
    for _ in range(width):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        numbers.append(1.0 if state >> 63 else -1.0)
    return torch.tensor(numbers)


def parts(width: int) -> tuple[int, ...]:
    """Return the powers of two that sum to `width`, the largest first: the sizes of its Hadamard matrices."""
    return tuple(1 << bit for bit in reversed(range(width.bit_length())) if width >> bit & 1)


def rotated(x: Tensor) -> Tensor:
    """Multiply rows (..., k) by the signs and the orthogonal Hadamard matrices of `parts`, in fp32."""
    x = x.float() * signs(x.shape[-1]).to(x.device)
    split = torch.split(x, list(parts(x.shape[-1])), dim=-1)
    return torch.cat([_hadamard(part) for part in split], dim=-1)


def _hadamard(x: Tensor) -> Tensor:
    """Add in the order of the kernel, so that both round alike."""
    size, half = x.shape[-1], 1
    while half < size:
        pairs = x.reshape(*x.shape[:-1], -1, 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack([low + high, low - high], dim=-2).flatten(-3)
        half *= 2
    return x * torch.tensor(1 / math.sqrt(size), dtype=torch.float32, device=x.device)


def mean_of(keys: Tensor, visible: Tensor | None = None) -> Tensor:
    """Return the mean (B, K, k) in fp32 of keys (B, K, L, k), of those that are `visible` (B, L).

    It is summed in fp64, so that the order of the sums, which differs between machines, changes nothing.
    """
    total = keys.new_zeros((*keys.shape[:2], keys.shape[3]), dtype=torch.float64)
    for at in range(0, keys.shape[2], _CHUNK):
        chunk = keys[:, :, at : at + _CHUNK].double()
        if visible is not None:
            chunk = chunk.masked_fill(~visible[:, None, at : at + _CHUNK, None], 0)
        total += chunk.sum(2)
    count = keys.new_full((1,), keys.shape[2]) if visible is None else visible.sum(-1)
    return (total / count.double().clamp(min=1).view(-1, 1, 1)).float()


def encode(keys: Tensor, mean: Tensor, index: IndexFormat) -> Codes:
    """Return the codes of keys (B, K, L, k) around `mean` (B, K, k). A key with a NaN has the scale NaN."""
    B, K, L, width = keys.shape
    blocks, scales = list[Tensor](), list[Tensor]()
    for at in range(0, L, _CHUNK):  # a multiple of a block
        numbers = rotated(keys[:, :, at : at + _CHUNK].float() - mean[:, :, None])
        scale = (_scale_of_sign(numbers) if index == "sign" else numbers.abs().amax(-1) / _LARGEST["int4"]).half()
        codes = (numbers / scale.float()[..., None]).round() if index == "int4" else torch.where(numbers < 0, -1.0, 1.0)
        codes = torch.nan_to_num(codes, nan=0.0).clamp(-_LARGEST[index], _LARGEST[index])
        codes = codes.masked_fill((scale == 0)[..., None], 0) if index == "int4" else codes
        rows = -codes.shape[2] % TOKENS
        blocks.append(_packed(F.pad(codes, (0, 0, 0, rows)).to(torch.int8), index))
        scales.append(F.pad(scale, (0, rows)))
    if not blocks:
        return Codes(
            keys.new_zeros((B, K, 0, block_bytes(index, width)), dtype=torch.uint8),
            keys.new_zeros((B, K, 0), dtype=torch.float16),
        )
    return Codes(torch.cat(blocks, 2), torch.cat(scales, 2))


def _scale_of_sign(numbers: Tensor) -> Tensor:
    """Return the factor with which the product with the signs is right for the key itself: |x|^2 / sum |x|."""
    wide = numbers.double()
    total = wide.abs().sum(-1)
    return torch.where(total == 0, 0.0, wide.square().sum(-1) / total).float()


def _packed(codes: Tensor, index: IndexFormat) -> Tensor:
    """Codes (B, K, 16 N, k) -> blocks (B, K, N, bytes)."""
    B, K, rows, width = codes.shape
    count = groups(index, width)
    if index == "sign":
        bits = F.pad(codes, (0, 32 * count - width), value=-1) > 0
        weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=codes.device)[:, None]
        four = (bits.view(B, K, rows // TOKENS, TOKENS, count, 8, 4) * weights).sum(-2, dtype=torch.uint8)
        return four.transpose(3, 4).reshape(B, K, rows // TOKENS, -1)
    nibbles = (F.pad(codes, (0, 8 * count - width)) + 8).to(torch.uint8)
    low, high = nibbles.view(B, K, rows // TOKENS, TOKENS, count, 2, 4).unbind(-2)
    return (low | high << 4).transpose(3, 4).reshape(B, K, rows // TOKENS, -1)


def unpacked(codes: Codes, index: IndexFormat, width: int) -> Tensor:
    """Return the codes (B, K, 16 N, width) as int8."""
    B, K, N, _ = codes.blocks.shape
    count = groups(index, width)
    four = codes.blocks.view(B, K, N, count, TOKENS, 4)
    if index == "sign":
        shifts = torch.arange(8, dtype=torch.uint8, device=four.device)[:, None]
        codes_of_four = (four[..., None, :] >> shifts & 1).flatten(-2).to(torch.int8) * 2 - 1
    else:
        codes_of_four = torch.cat([four & 15, four >> 4], dim=-1).to(torch.int8) - 8
    return codes_of_four.transpose(3, 4).reshape(B, K, N * TOKENS, -1)[..., :width]


def query_codes(query: Tensor, index: IndexFormat) -> tuple[Tensor, Tensor]:
    """Return the codes (..., k) in int8 of rotated queries, and their scales (...) in fp32."""
    numbers, largest = rotated(query), _QUERY_LARGEST[index]
    scale = numbers.abs().amax(-1) / largest
    codes = torch.nan_to_num((numbers / scale[..., None]).round(), nan=0.0, posinf=largest)
    return codes.clamp(-largest, largest).to(torch.int8), scale


def estimates(query: Tensor, codes: Codes, index: IndexFormat, positions: int, scale: float) -> Tensor:
    """Return estimated scores (B, H, T, L) in fp32. All scores of a query have the same unknown number added.

    Query heads are ordered by key head. `scale` is that of the scores.
    """
    B, H, T, width = query.shape
    K = codes.blocks.shape[1]
    of_query, query_scale = query_codes(query, index)
    of_keys = unpacked(codes, index, width)[:, :, :positions]
    rows = of_query.view(B, K, H // K * T, width).double()
    products = (rows @ of_keys.double().transpose(2, 3)).float().view(B, K, H // K, T, positions)
    scored = products * codes.scales[:, :, None, None, :positions].float()
    factor = query_scale * torch.tensor(scale, dtype=torch.float32)
    return (scored * factor.view(B, K, H // K, T, 1)).view(B, H, T, positions)

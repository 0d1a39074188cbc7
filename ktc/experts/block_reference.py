"""What the blocks of GGUF files mean, in plain PyTorch: the weights in them, and the blocks for given weights.

In: bytes (rows, bytes of a row) of whole blocks, or weights (rows, columns). The C++ of
`runtime/include/ktc/weight_format` must agree to the last bit, and both with the package `gguf`. Refused: weights that
are not finite, and formats that are only read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

_MXFP4: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled, to be integers


def dequantise_blocks(blocks: Tensor, name: str) -> Tensor:
    """fp32 weights (rows, columns) of uint8 blocks of the weight format `name`."""
    size, read, _ = _FORMATS[name]
    return read(blocks.reshape(-1, size)).reshape(blocks.shape[0], -1)


def quantise_blocks(weights: Tensor, name: str) -> Tensor:
    """uint8 blocks (rows, bytes of a row) of weights whose rows are whole blocks."""
    if not bool(weights.isfinite().all()):
        raise ValueError("weights that are not finite cannot be quantised")
    write = _FORMATS[name][2]
    if write is None:
        raise ValueError(f"{name} weights are taken only as a file stores them")
    width = 1 if name == "fp16" else 32
    return write(weights.float().reshape(-1, width)).reshape(weights.shape[0], -1)


def _half(field: Tensor) -> Tensor:
    """(blocks, 1) scales of two bytes each."""
    return field.contiguous().view(torch.float16).float()


def _half_bytes(scale: Tensor) -> Tensor:
    return scale.half().view(torch.uint8)


def _inverse(scale: Tensor) -> Tensor:
    """Zero for scales so small that it would overflow; as fp16 they are zero themselves."""
    return torch.where(scale.abs() < torch.finfo(torch.float32).tiny, 0, 1 / scale)


def _unpack(packed: Tensor, width: int, bits: int) -> Tensor:
    """Codes of `bits`: of each `width` bytes the lowest come first, then the ones above."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(-1, 1)
    codes = packed.reshape(packed.shape[0], -1, 1, width) >> shifts & (1 << bits) - 1
    return codes.reshape(packed.shape[0], -1)


def _pack_nibbles(codes: Tensor) -> Tensor:
    codes = codes.to(torch.uint8)
    return codes[:, :16] | codes[:, 16:] << 4


def _fp16(blocks: Tensor) -> Tensor:
    return _half(blocks)


def _to_q8_0(weights: Tensor) -> Tensor:
    scale = weights.abs().amax(1, keepdim=True) / 127
    scaled = weights * _inverse(scale)
    whole = scaled.abs().floor()
    codes = scaled.sign() * (whole + (2 * (scaled.abs() - whole)).floor())  # halves away from zero
    return torch.cat((_half_bytes(scale), codes.to(torch.int8).view(torch.uint8)), 1)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks[:, :2])


def _to_q4_0(weights: Tensor) -> Tensor:
    largest = weights.gather(1, weights.abs().argmax(1, keepdim=True))
    scale = largest / -8
    codes = (weights * _inverse(scale) + 8.5).trunc().clamp(0, 15)
    return torch.cat((_half_bytes(scale), _pack_nibbles(codes)), 1)


def _q4_0(blocks: Tensor) -> Tensor:
    return (_unpack(blocks[:, 2:], 16, 4).float() - 8) * _half(blocks[:, :2])


def _mxfp4_scale(exponent: Tensor) -> Tensor:
    exponent = exponent.to(torch.int32)
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp_max(1), (exponent - 1) << 23)
    return bits.to(torch.int32).view(torch.float32)


def _to_mxfp4(weights: Tensor) -> Tensor:
    largest = weights.abs().amax(1, keepdim=True)
    exponent = torch.where(largest > 0, largest.log2().floor() - 2 + 127, 0).clamp(0, 254)
    candidates = _mxfp4_scale(exponent) * torch.tensor(_MXFP4)
    codes = (candidates[:, None] - weights[..., None]).abs().argmin(-1)
    return torch.cat((exponent.to(torch.uint8), _pack_nibbles(codes)), 1)


def _mxfp4(blocks: Tensor) -> Tensor:
    numbers = torch.tensor(_MXFP4, dtype=torch.float32)[_unpack(blocks[:, 1:], 16, 4).long()]
    return numbers * _mxfp4_scale(blocks[:, :1])


def _scales_and_mins(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of the eight runs of 32 weights, each (blocks, 8, 1)."""
    for_scale, for_min, lower = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = torch.cat((for_scale & 63, lower & 15 | for_scale >> 2 & 48), 1).float()
    least = torch.cat((for_min & 63, lower >> 4 | for_min >> 2 & 48), 1).float()
    return (_half(blocks[:, :2]) * scale)[..., None], (_half(blocks[:, 2:4]) * least)[..., None]


def _q4_k(blocks: Tensor) -> Tensor:
    scale, least = _scales_and_mins(blocks)
    return scale * _unpack(blocks[:, 16:], 32, 4).view(-1, 8, 32) - least


def _q5_k(blocks: Tensor) -> Tensor:
    scale, least = _scales_and_mins(blocks)
    codes = _unpack(blocks[:, 48:], 32, 4) | _unpack(blocks[:, 16:48], 32, 1) << 4
    return scale * codes.view(-1, 8, 32) - least


def _q6_k(blocks: Tensor) -> Tensor:
    codes = _unpack(blocks[:, :128], 64, 4) | _unpack(blocks[:, 128:192], 32, 2) << 4
    scale = _half(blocks[:, 208:]) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return scale[..., None] * (codes.float() - 32).view(-1, 16, 16)


# Bytes of a block, its reader, and its writer where weights can be made into such blocks.
_FORMATS: Final[Mapping[str, tuple[int, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor] | None]]] = {
    "fp16": (2, _fp16, _half_bytes),
    "q8_0": (34, _q8_0, _to_q8_0),
    "q4_0": (18, _q4_0, _to_q4_0),
    "mxfp4": (17, _mxfp4, _to_mxfp4),
    "q4_k": (144, _q4_k, None),
    "q5_k": (176, _q5_k, None),
    "q6_k": (210, _q6_k, None),
}
# Where a block has its fp16 scales, and by what they make random codes weights of about one.
_SCALES: Final[Mapping[str, tuple[tuple[int, float], ...]]] = {
    "q8_0": ((0, 1 / 73),),
    "q4_0": ((0, 1 / 4.6),),
    "q4_k": ((0, 1 / 280), (2, 1 / 38)),
    "q5_k": ((0, 1 / 580), (2, 1 / 38)),
    "q6_k": ((208, 1 / 1350),),
}


def random_blocks(rows: int, columns: int, name: str, scale: float, generator: torch.Generator) -> Tensor:
    """Blocks of random codes with finite scales, whose weights are about as large as `scale`: for tests."""
    if name == "fp16":
        return _half_bytes(torch.randn(rows, columns, generator=generator) * scale)
    size = _FORMATS[name][0]
    width = 256 if name.endswith("_k") else 32
    count = rows * columns // width
    blocks = torch.randint(256, (count, size), dtype=torch.uint8, generator=generator)
    if name == "mxfp4":
        around = int(torch.tensor(scale / 5.6).log2().floor()) + 128
        blocks[:, 0] = torch.randint(around, around + 2, (count,), generator=generator)
    for place, factor in _SCALES.get(name, ()):
        of_block = torch.rand(count, 1, generator=generator).add(0.5).mul(scale * factor)
        blocks[:, place : place + 2] = _half_bytes(of_block)
    return blocks.view(rows, -1)

"""Scores that the query heads of a key head share: the reference of the kernel, bit for bit.

In: scores (B, K, G, T, L) of the G query heads of each key head. Out: the sum of their softmax (B, K, T, L). Its powers
of two are linear between whole exponents: the bits of such a power are its logarithm, so they take a product and a sum.
With one query head, positions are ordered as by its scores. Relative to a query's greatest sampled weight, all weights
above 2^100 are equal, and all below 2^-100.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from ktc.model.attention.sparsity import TOKENS

_STRETCH: Final = 64  # blocks whose weights are summed before those of others
_SAMPLED: Final = 64  # blocks at least whose greatest score is the unit of a query's weights
_EXPONENT: Final = 2.0**23  # bits of fp32 per power of two
_PARTS_OF_E: Final = 12102203.0  # 2^23 log2(e)
_LEAST: Final = 27 * _EXPONENT  # the bits of 2^-100; shares of less could be denormal numbers, which are slow
_MOST: Final = 227 * _EXPONENT  # the bits of 2^100
_ONE: Final = 127 * _EXPONENT  # the bits of 1.0


def shared(scores: Tensor, visible: Tensor) -> Tensor:
    """Return the shared scores in fp32 of positions that are `visible` (B, T, L); those of others mean nothing."""
    *outer, L = scores.shape
    blocks = -(-L // (TOKENS * _STRETCH)) * _STRETCH
    room = blocks * TOKENS - L
    seen = F.pad(visible, (0, room))[:, None, None]
    parts = F.pad(scores.float() * _PARTS_OF_E, (0, room))
    powers = _of_bits(parts + (_ONE - _greatest_sample(parts, seen, L))[..., None])
    powers = powers.masked_fill(~seen, 0.0).view(*outer, blocks // _STRETCH, _STRETCH, TOKENS)
    total = _in_order(_in_order(_in_order(powers, -2), -2), -1)
    inverse = torch.where(total > 0, 1 / total, 0)
    shares = powers.flatten(-3)[..., :L].bfloat16().float() * inverse[..., None]
    return _in_order(shares, 2)


def _greatest_sample(parts: Tensor, seen: Tensor, positions: int) -> Tensor:
    """Return the greatest of each query's scores in the sampled blocks, a finite number."""
    blocks = -(-positions // TOKENS)
    sampled = torch.arange(parts.shape[-1], device=parts.device) // TOKENS % max(1, blocks // _SAMPLED) == 0
    most = torch.finfo(torch.float32).max
    return parts.masked_fill(~(seen & sampled) | parts.isnan(), -math.inf).amax(-1).clamp(-most, most)


def _of_bits(bits: Tensor) -> Tensor:
    """Return the numbers of these bits, from 2^-100 to 2^100; a NaN gives the greatest."""
    return bits.nan_to_num(_MOST, _MOST, _LEAST).clamp(_LEAST, _MOST).int().view(torch.float32)


def _in_order(numbers: Tensor, dim: int) -> Tensor:
    """Sum one after the other, since the result depends on the order."""
    first, *others = numbers.unbind(dim)
    for addend in others:
        first = first + addend
    return first

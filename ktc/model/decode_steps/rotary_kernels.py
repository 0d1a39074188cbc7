"""Queries and keys rotated by one Triton kernel, with the roundings of stock code.

In: queries (B, H, T, D) and keys (B, K, T, D), and cosines and sines of positions, or unit complex numbers. Out: both
rotated. Stock code takes up to twelve kernels. Importing this needs Triton.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportReturnType=false
# The arguments of device code get their types from Triton, which is not typed itself.

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS: Final = 4  # of a program


def rotate_halves(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate the numbers `j` and `j + D / 2` together; cosines (B or 1, T, D or D / 2) are of the queries' dtype.

    With `interleaved` these were the neighbours `2 j` and `2 j + 1`.
    """
    return _rotated(query, key, (cos, sin), pairs=False, interleaved=interleaved)


def rotate_pairs(query: Tensor, key: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate neighbours together: they are the parts of numbers that complex `turns` (B or 1, T, D / 2) multiply."""
    numbers = torch.view_as_real(turns)
    return _rotated(query, key, (numbers[..., 0], numbers[..., 1]), pairs=True, interleaved=True)


def _rotated(
    query: Tensor, key: Tensor, angles: tuple[Tensor, Tensor], *, pairs: bool, interleaved: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    cos, sin = angles  # of several tokens they may be columns on a GPU, as its products of positions are
    B, H, T, D = query.shape
    K = key.shape[1]
    queries, keys = query.new_empty(query.shape), key.new_empty(key.shape)
    groups = triton.cdiv(H, _HEADS)
    of_cos, of_sin = ((angle.stride(0) if len(angle) > 1 else 0, *angle.stride()[1:]) for angle in angles)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        _rotate[(B * T, groups + triton.cdiv(K, _HEADS))](
            query, key, cos, sin, queries, keys, H, K, T, groups, *query.stride()[:3], *key.stride()[:3],
            *of_cos, *of_sin, HALF=D // 2, BLOCK=triton.next_power_of_2(D // 2),
            HEADS=_HEADS, TWICE=cos.shape[-1] == D, PAIRS=pairs, INTERLEAVED=interleaved, num_warps=1,
            enable_fp_fusion=pairs,  # PyTorch rounds each product of real numbers, and no product of complex ones
        )  # fmt: skip
    return queries, keys


@triton.jit
def _turned(
    x, out, cos, sin, cos_column, sin_column, head, heads, of_head, to_head,
    HALF: tl.constexpr, BLOCK: tl.constexpr, TWICE: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate some heads of a token."""
    kind: tl.constexpr = out.dtype.element_ty
    d = tl.arange(0, BLOCK)
    there = (head < heads)[:, None] & (d < HALF)[None, :]
    of_pair = x + head[:, None] * of_head
    if INTERLEAVED:
        x1 = tl.load(of_pair + d[None, :] * 2, mask=there, other=0).to(tl.float32)
        x2 = tl.load(of_pair + d[None, :] * 2 + 1, mask=there, other=0).to(tl.float32)
    else:
        x1 = tl.load(of_pair + d[None, :], mask=there, other=0).to(tl.float32)
        x2 = tl.load(of_pair + d[None, :] + HALF, mask=there, other=0).to(tl.float32)
    first = d * 2 if PAIRS else d
    second = first + 1 if PAIRS else d + HALF
    c1 = tl.load(cos + d * cos_column, mask=d < HALF, other=0).to(tl.float32)[None, :]
    s1 = tl.load(sin + d * sin_column, mask=d < HALF, other=0).to(tl.float32)[None, :]
    if PAIRS:
        y1, y2 = x1 * c1 - x2 * s1, x1 * s1 + x2 * c1
    else:
        c2, s2 = c1, s1
        if TWICE:
            c2 = tl.load(cos + second * cos_column, mask=d < HALF, other=0).to(tl.float32)[None, :]
            s2 = tl.load(sin + second * sin_column, mask=d < HALF, other=0).to(tl.float32)[None, :]
        y1 = (x1 * c1).to(kind).to(tl.float32) - (x2 * s1).to(kind).to(tl.float32)
        y2 = (x2 * c2).to(kind).to(tl.float32) + (x1 * s2).to(kind).to(tl.float32)
    tl.store(out + head[:, None] * to_head + first[None, :], y1.to(kind), mask=there)
    tl.store(out + head[:, None] * to_head + second[None, :], y2.to(kind), mask=there)


@triton.jit
def _rotate(
    query, key, cos, sin, queries, keys, heads, key_heads, tokens, groups,
    query_row, query_head, query_token, key_row, key_head, key_token,
    cos_row, cos_token, cos_column, sin_row, sin_token, sin_column,
    HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, TWICE: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate some heads of a token in a program: of the queries, or behind those of the keys."""
    row, token = (tl.program_id(0) // tokens).to(tl.int64), tl.program_id(0) % tokens
    group, head = tl.program_id(1), tl.arange(0, HEADS)
    cos += row * cos_row + token * cos_token
    sin += row * sin_row + token * sin_token
    if group < groups:
        of_token = query + row * query_row + token * query_token
        to_token = queries + (row * heads * tokens + token) * (2 * HALF)
        _turned(
            of_token, to_token, cos, sin, cos_column, sin_column, group * HEADS + head, heads, query_head,
            tokens * 2 * HALF, HALF, BLOCK, TWICE, PAIRS, INTERLEAVED,
        )  # fmt: skip
    else:
        of_token = key + row * key_row + token * key_token
        to_token = keys + (row * key_heads * tokens + token) * (2 * HALF)
        _turned(
            of_token, to_token, cos, sin, cos_column, sin_column, (group - groups) * HEADS + head, key_heads, key_head,
            tokens * 2 * HALF, HALF, BLOCK, TWICE, PAIRS, INTERLEAVED,
        )  # fmt: skip

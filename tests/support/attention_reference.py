"""Attention in fp64, and the shapes that decode kernels are compared with it on."""

from __future__ import annotations

import torch
from kernel_layers import ISAS
from torch import Tensor

from ktc.model.attention.decode import KVCacheView
from ktc.model.kernels.attention_spec import AttentionSpec
from ktc.model.kernels.linear_spec import ISAS as LINEAR_ISAS

# Sequences, query heads, key heads, tokens, positions, widths of keys, of rotary keys and of values.
SHAPES = [
    (1, 1, 1, 1, 1, 16, 0, 16), (2, 4, 2, 1, 65, 33, 0, 17), (1, 16, 1, 1, 200, 64, 16, 64),
    (1, 70, 1, 2, 131, 24, 8, 40),    (3, 6, 3, 5, 37, 128, 0, 128), (1, 2, 2, 1, 9000, 32, 0, 32),
    (1, 7, 1, 1, 131, 33, 9, 17),
    (1, 20, 1, 1, 200, 64, 32, 64),   (2, 36, 2, 2, 333, 96, 0, 128),  # whole tiles of many rows
    (1, 80, 4, 1, 300, 64, 32, 64),   # the same, and two blocks of positions in a stretch
]  # fmt: skip
INT8_SPECS = [
    AttentionSpec("int8_attention", dtype, isa)
    for isa in LINEAR_ISAS
    if isa in ISAS
    for dtype in ("bf16", "fp16", "fp32")
]
# One library, of which tests of the kernel and of the cache use the last.
INT8_QUICK = tuple(spec for spec in INT8_SPECS if spec.dtype == "fp32" and spec.isa in ("scalar", "avx2"))


def reference(
    query: Tensor, heads: KVCacheView, scale: float, mask: Tensor | None = None, sinks: Tensor | None = None
) -> Tensor:
    """(B, T, H, v) in fp64."""
    keys = heads.keys if heads.rope_keys is None else torch.cat([heads.keys, heads.rope_keys], -1)
    keys, values = (
        each.double().repeat_interleave(query.shape[1] // keys.shape[1], 1) for each in (keys, heads.values)
    )
    scores = query.double() @ keys.transpose(2, 3) * scale
    new, positions = scores.shape[-2:]
    seen = torch.ones(new, positions, dtype=torch.bool).tril(positions - new) if mask is None else mask
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return (torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ values).transpose(1, 2)
    return (scores.softmax(-1).nan_to_num() @ values).transpose(1, 2)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())

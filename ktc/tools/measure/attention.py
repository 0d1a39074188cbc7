"""PyTorch's attention and grouped products, on the CPU or a GPU, in FLOP/s.

In: a device and sizes. Attention is causal, so that half of its scores are computed. PyTorch has another path for
values that are narrower than keys.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import torch
from torch.nn.functional import grouped_mm, scaled_dot_product_attention

from ktc.foundation.rates import Figure
from ktc.tools.measure.figures import repeated, seconds

_BUDGET: Final = 0.3  # seconds of one figure
_HEADS: Final = 16
_TOKENS: Final = 512
EVEN: Final = (128, 128)  # widths of keys and of values, as in most models
LATENT: Final = (192, 128)  # as in DeepSeek-V2 and V3
_EXPERTS: Final = (64, 2048, 1408)  # of DeepSeek-V2-Lite: their number, rows and columns


def attention(device: torch.device, widths: tuple[int, int], tokens: int = _TOKENS, batch: int = 1) -> Figure:
    """Return FLOP/s of a forward in bf16 over `batch` sequences of `tokens` tokens."""
    keys, values = widths
    query, key = (torch.randn(batch, _HEADS, tokens, keys, device=device).bfloat16() for _ in range(2))
    value = torch.randn(batch, _HEADS, tokens, values, device=device).bfloat16()
    flops = batch * _HEADS * tokens * (tokens + 1) * (keys + values)
    attend = partial(scaled_dot_product_attention, query, key, value, is_causal=True)
    return repeated(lambda: flops / seconds(device, attend), _BUDGET)


def grouped(device: torch.device, rows: int = 768, sizes: tuple[int, int, int] = _EXPERTS) -> Figure:
    """Return FLOP/s of one product for all experts in bf16, `rows` rows for each."""
    count, inputs, outputs = sizes
    x = torch.randn(count * rows, inputs, device=device).bfloat16()
    weights = torch.randn(count, inputs, outputs, device=device).bfloat16()
    ends = torch.arange(1, count + 1, device=device, dtype=torch.int32) * rows
    product = partial(grouped_mm, x, weights, offs=ends)
    return repeated(lambda: 2 * count * rows * inputs * outputs / seconds(device, product), _BUDGET)

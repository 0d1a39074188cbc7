"""Synthetic keys and queries of long text: topics, slowly changing parts, outlying channels, needles."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Context:
    """Keys (L, D), queries (N, D), the scale of scores, and where a query has a needle, its position."""

    keys: Tensor
    queries: Tensor
    scale: float
    needles: Tensor | None = None

    @property
    def weights(self) -> Tensor:
        return (self.queries @ self.keys.T * self.scale).softmax(-1)


def long_context(kind: str, rope: bool, *, positions: int, width: int, queries: int, seed: int = 0) -> Context:
    """`kind` is `mass`, whose weight is spread over tokens like the query's, or `needle`."""
    draw = torch.Generator().manual_seed(seed)

    def randn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=draw)

    segment = torch.cumsum((torch.rand(positions, generator=draw) < 1 / 150).long(), 0)
    topics, tokens = randn(64, width), randn(1024, width)
    of_segment = torch.randint(0, 64, (int(segment.max()) + 1,), generator=draw)
    slow, noise = torch.zeros(positions, width), randn(positions, width)
    for at in range(1, positions):
        slow[at] = 0.9 * slow[at - 1] + math.sqrt(1 - 0.81) * noise[at]
    outliers = torch.zeros(width)
    outliers[torch.randperm(width, generator=draw)[:6]] = 8 * torch.sign(randn(6))
    token = tokens[torch.randint(0, 1024, (positions,), generator=draw)]
    keys = 0.8 * topics[of_segment[segment]] + 0.5 * slow + 0.8 * token + outliers
    if kind == "mass":
        asked = torch.randint(0, 64, (queries,), generator=draw), torch.randint(0, 1024, (queries,), generator=draw)
        found = 0.9 * topics[asked[0]] + 0.9 * tokens[asked[1]] + 0.5 * randn(queries, width)
        scale, needles = 1.3, None
    else:
        needles = torch.randperm(positions - 512, generator=draw)[:queries] + 128
        names = torch.nn.functional.normalize(randn(queries, width), dim=-1) * math.sqrt(width)
        keys[needles] = 0.3 * keys[needles] + names
        found, scale = 1.3 * names + 0.3 * randn(queries, width), 1.6
    if rope:
        # A needle's query has its phase, as that of channels which rotate slowly.
        found = _rotary(found, torch.full((queries,), positions) if needles is None else needles)
        keys = _rotary(keys, torch.arange(positions))
    return Context(keys, found, scale / math.sqrt(width), needles)


def _rotary(x: Tensor, position: Tensor) -> Tensor:
    width = x.shape[-1]
    angle = position[:, None] * 1e6 ** (-torch.arange(0, width, 2) / width)
    even, odd = x[:, 0::2], x[:, 1::2]
    return torch.stack([even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()], -1).flatten(-2)

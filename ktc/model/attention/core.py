"""`LatentCore`: absorbed attention in a rewritten graph, over the positions of one call."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ktc.model.attention.latent import attend
from ktc.model.attention.up_projection import UpProjection


class LatentCore(nn.Module):
    """Attention with the up-projection `weight` (H (n + v), c), in the place of that projection and the stock core."""

    def __init__(
        self, weight: nn.Parameter, heads: int, nope: int, *, scale: float, causal: bool, window: int, elide: bool
    ) -> None:
        super().__init__()
        self.weight = weight
        self._heads, self._nope, self._scale = heads, nope, scale
        self._causal, self._window, self._elide = causal, window, elide

    def forward(
        self, query: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """(b, H, s, n + r), (b, 1, s, c) or (b, s, c), (b, any, s, r) -> (b, s, H, v)."""
        length = query.shape[2]
        up = UpProjection(self.weight.view(self._heads, -1, self.weight.shape[1]), self._nope)
        latent = latent.reshape(latent.shape[0], length, -1)
        allowed = self._visible(query, length) if mask is None else mask
        return attend(query, latent, k_rope[:, 0], up, scale=self._scale, mask=allowed, sinks=sinks, elide=self._elide)[
            0
        ]

    def _visible(self, query: Tensor, length: int) -> Tensor:
        place = torch.arange(length, device=query.device)
        distance = place[:, None] - place[None, :]
        seen = distance >= 0 if self._causal else torch.ones_like(distance, dtype=torch.bool)
        return (seen & (distance < self._window) if self._window >= 0 else seen)[None, None]

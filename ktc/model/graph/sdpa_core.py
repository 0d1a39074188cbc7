"""`SdpaCore`: the attention core of a captured graph as a module, in a rewritten graph."""

from __future__ import annotations

from torch import Tensor, nn

from ktc.model.graph import ops


class SdpaCore(nn.Module):
    """`ops.sdpa` with the settings of one node."""

    def __init__(self, scale: float, causal: bool, window: int, *, softcap: float | None) -> None:
        super().__init__()
        self._settings, self._softcap = (scale, causal, window), softcap

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None, mask: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """(b, h, s, d), (b, h_kv, s, d), (b, h_kv, s, d_v) -> (b, s, h, d_v)."""
        return ops.sdpa(query, key, value, *self._settings, sinks, mask, self._softcap, bias)

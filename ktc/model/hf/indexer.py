"""The trained indexers of some models: small attention modules that choose positions (DeepSeek-V3.2)."""

from __future__ import annotations

from typing import Any, cast

from torch import nn


def has_indexer(attention: nn.Module) -> bool:
    """Return whether a module, or another one for it, chooses the positions that it attends to."""
    return hasattr(attention, "indexer")


def positions_of_indexer(attention: nn.Module) -> int:
    """Return how many positions the indexer of a module chooses for a token, 0 without one."""
    config = cast("Any", attention).config if has_indexer(attention) else None
    return int(getattr(config, "index_topk", 0))

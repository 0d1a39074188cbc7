"""Weights of a model that share their values with another, which an addition to either changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import nn


def tied_names(model: nn.Module) -> frozenset[str]:
    """Return the names on both sides of each pair, as transformers knows them."""
    pairs = cast("Mapping[str, str]", getattr(model, "all_tied_weights_keys", None) or {})
    return frozenset((*pairs.keys(), *pairs.values()))

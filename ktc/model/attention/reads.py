"""Bytes that the sparse attention of a whole model has read, and those that dense attention would have read.

In: a model, and its counters at an earlier time. Out: bytes per new token, summed over layers, of the tokens that were
computed sparsely. Dense calls (up to the budget, prompts) and layers without sparse attention are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from ktc.model.attention.sparse import Sparse
from ktc.model.attention.sparsity import Traffic


@dataclass(frozen=True, slots=True)
class SparseReads:
    """Bytes of index, keys and values per new token in `layers` layers; both are 0 where no token was sparse."""

    layers: int
    tokens: int
    bytes_per_token: float
    dense_bytes_per_token: float

    def __str__(self) -> str:
        layers = f"{self.layers} layer{'' if self.layers == 1 else 's'}"
        if not self.tokens:
            return f"sparse attention in {layers}: every step was short enough to be dense"
        read, dense = (nbytes / 1e6 for nbytes in (self.bytes_per_token, self.dense_bytes_per_token))
        return (
            f"sparse attention in {layers}: {read:,.3f} MB per token read, dense {dense:,.3f} MB ({dense / read:.1f}x),"
            f" over {self.tokens:,} tokens"
        )


def counters(model: nn.Module) -> dict[str, Traffic]:
    """Return the counter of every module with sparse attention, by name."""
    modules = cast("Iterator[tuple[str, Any]]", model.named_modules())
    return {name: module.traffic for name, module in modules if isinstance(getattr(module, "sparse", None), Sparse)}


def reads_since(model: nn.Module, before: Mapping[str, Traffic]) -> SparseReads | None:
    """Return the reads of `model` since `before`; None for a model without sparse attention."""
    spent = [now - before[name] for name, now in counters(model).items()]
    if not spent:
        return None
    sparse = [traffic for traffic in spent if traffic.tokens]
    return SparseReads(
        len(spent),
        max((traffic.tokens for traffic in sparse), default=0),
        sum((traffic.index + traffic.gathered) / traffic.tokens for traffic in sparse),
        sum(traffic.dense / traffic.tokens for traffic in sparse),
    )

"""`sparse_attention`: each query reads the blocks of keys that score best, besides a window and the first tokens.

It is not built: `compile` refuses it by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ktc.targets.settings import Count, Positive
from ktc.targets.target import Target


@dataclass(frozen=True, slots=True)
class SparseAttention(Target):
    """`topk` blocks of `block` keys, the last `window`, the first `sink` tokens; dense below `min_context` tokens."""

    topk: Positive
    block: Positive = 64
    window: Count = 0
    sink: Count = 0
    min_context: Count = 0

    name: ClassVar = "sparse_attention"
    fills: ClassVar = "kernel"
    accepts: ClassVar = ("attention", "mla")
    absorbs: ClassVar = ("core",)

"""Blocks that are too long to be worth a graph: scans and recurrences that Python unrolls into operator after operator.

In: a block and a call of it on meta tensors. Out: how it is left alone, or "". Export takes tens of milliseconds per
operation; a block in which neither experts nor softmax attention run has nothing that a pattern looks for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

LONGEST = 100  # operations; a gated MLP has about 10, a group-limited router 60
PLAIN = "neither experts nor softmax attention run in it"  # begins the words about such a block


class _Count(TorchDispatchMode):
    """Counts what runs, and whether experts or a softmax are among it."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.sought = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        self.sought |= func.namespace == "ktc_capture" or "softmax" in func.name()
        return func(*args, **(kwargs or {}))


def left_alone(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why `block`, which runs on meta tensors, is not exported; "" if it is."""
    with torch.no_grad(), _Count() as count:
        block(*args, **kwargs)
    if count.sought or count.operations <= LONGEST:
        return ""
    return f"{PLAIN}, and {count.operations:,} operations are too many for a graph"

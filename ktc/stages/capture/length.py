"""Blocks that are too long for a graph: scans and recurrences that Python unrolls into many operators.

Input: a block and a call of it on meta tensors. Output: the reason to leave it unchanged, or "". Export takes tens of
milliseconds per operation, and no pattern matches a block without experts and softmax attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ktc.model.experts.private_api import TorchDispatchMode

LONGEST = 100  # operations; a gated MLP has about 10, a group-limited router 60
PLAIN = "neither experts nor softmax attention run in it"  # prefix of the reason for such a block


class _Count(TorchDispatchMode):
    """Count operations, and record whether experts or a softmax are among them."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.sought = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        self.sought |= func.namespace == "ktc_capture" or "softmax" in func.name()
        return func(*args, **(kwargs or {}))


def reason_not_exported(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return why `block`, which runs on meta tensors, is not exported; "" if it is."""
    with torch.no_grad(), _Count() as count:
        block(*args, **kwargs)
    if count.sought or count.operations <= LONGEST:
        return ""
    return f"{PLAIN}, and {count.operations:,} operations are too many for a graph"

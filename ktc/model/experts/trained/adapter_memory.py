"""The memory of adapters on routed experts while they train, and whether a GPU that multiplies the experts has room.

A plan counts them on the GPU where they are a small part of its budget. A trainer finds other weights there already, so
it allows a larger part of what is free.
"""

from __future__ import annotations

from typing import Final

_TENSORS: Final = 4  # of a factor's size: itself, its gradient, and AdamW's two moments
_OF_BUDGET, _OF_FREE = 4, 2  # parts, of which they take one at most


def trained_bytes(factors: int) -> int:
    """Return the bytes of factors that take `factors` bytes, with their gradients and AdamW's moments."""
    return _TENSORS * factors


def planned_on_gpu(nbytes: int, budget: int | None, beside: int) -> bool:
    """Return whether a plan puts them on a GPU with this budget, `beside` bytes that stay there."""
    return budget is not None and nbytes * _OF_BUDGET <= budget and nbytes + beside <= budget


def fits(nbytes: int, free: int) -> bool:
    """Return whether they leave enough of a GPU's free memory to everything else."""
    return nbytes * _OF_FREE <= free

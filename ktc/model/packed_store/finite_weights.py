"""Whether weights are finite numbers, and the message about those that are not.

A file that a disk or a download has damaged usually holds infinities and NaN, and a single one would silently spread
through the whole model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ktc.diagnostics import Diagnostic
from ktc.model.checkpoint import WeightSource


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor holds neither infinities nor NaN; integers never do."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    low, high = tensor.aminmax()  # one pass without a copy; a NaN becomes both bounds
    return math.isfinite(low.item()) and math.isfinite(high.item())


def are_numbers(codes: Tensor) -> bool:
    """Return whether no byte of fp8 is a NaN; codes that are signed integers never are."""
    return codes.dtype != torch.uint8 or not bool((codes & 0x7F == 0x7F).any())


def not_finite(source: WeightSource, expert: int | None) -> Diagnostic:
    """Return the diagnostic (L407) about a row, or one expert of it, with non-finite values."""
    which = "" if expert is None or source.expert is not None else f" (expert {expert})"
    return Diagnostic(
        "L407",
        f"tensor `{source.source_key}`{which} in `{source.file}` holds values that are not finite",
        hint="`load(allow_nonfinite=True)` takes it as it is; if the original is finite, copy it again",
    )

"""Errors between two results: relative Frobenius norms that no rounding, NaN or infinity hides."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def gradient_error(found: Tensor | None, wanted: Tensor, least: float) -> float:
    """Return the error of a gradient relative to its norm, or to `least` where that is larger: rounding remains."""
    if found is None or found.shape != wanted.shape:
        return math.inf
    return float((found.double() - wanted.double()).norm() / max(float(wanted.double().norm()), least))


def relative(found: Tensor, wanted: Tensor) -> float:
    """Return ||found - wanted|| / ||wanted|| of the finite numbers; infinite if others differ in kind or place."""
    found, wanted = found.detach().double(), wanted.detach().double()
    finite = wanted.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return math.inf
    if not torch.equal(wanted[~finite].nan_to_num(7.0, 8.0, 9.0), found[~finite].nan_to_num(7.0, 8.0, 9.0)):
        return math.inf
    difference, size = float((found - wanted)[finite].norm()), float(wanted[finite].norm())
    return difference / size if size else (0.0 if difference == 0.0 else math.inf)

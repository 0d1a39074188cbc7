"""Errors of a tensor against an expected one, and the limits of verdicts.

All sums are in fp64. A whole tensor has one relative Frobenius error; rows of outputs have one error each.
"""

from __future__ import annotations

import math
from typing import Final, cast

from torch import Tensor

TOLERANCE: Final = 2e-5
"""The limit of a relative error in fp32: correct rewrites stay below 1e-6, wrong ones are above 1e-3."""
TWICE: Final = 2.0
"""On real weights an error may be this multiple of the stock model's own error."""
FLOOR: Final = TOLERANCE
"""The error that is always allowed on real weights: sums of fp32 in another order."""
_SMALL = 1e-3  # of the median norm: a row of about zero has no relative error of its own


def relative_error(actual: Tensor | None, expected: Tensor | None, floor: float = 0.0) -> float:
    """Return ||actual - expected|| / max(||expected||, floor).

    A missing tensor counts as zero; if only one is zero, infinity. NaN and infinity must be in the same places, and the
    norms are those of the other values.
    """
    if expected is None or not bool(expected.any()):
        if actual is None or not bool(actual.any()):
            return 0.0
        return norm(actual) / floor if floor else math.inf
    if actual is None or actual.shape != expected.shape:
        return math.inf
    one, other = actual.double(), expected.double()
    finite = other.isfinite()
    if not one[~finite].nan_to_num(nan=0.5).equal(other[~finite].nan_to_num(nan=0.5)):
        return math.inf
    one, other = one[finite], other[finite]
    size, distance = max(norm(other), floor), norm(one - other)
    if distance == 0:
        return 0.0
    relative = distance / size if size else math.inf
    return math.inf if math.isnan(relative) else relative


def norm(tensor: Tensor) -> float:
    """Return the Frobenius norm, in fp64."""
    return float(cast("Tensor", tensor.double().norm()))


def row_errors(actual: Tensor, wanted: Tensor) -> Tensor:
    """Return the relative error (N,) fp64 of each row of outputs (N, anything)."""
    actual, wanted = actual.double().flatten(1), wanted.double().flatten(1)
    norms = wanted.square().sum(1).sqrt()
    return (actual - wanted).square().sum(1).sqrt() / norms.clamp_min(_SMALL * float(norms.median())).clamp_min(1e-300)


def root_mean_square(errors: Tensor) -> float | None:
    """Return the root mean square, 0 of nothing, `None` if it is not finite."""
    value = math.sqrt(float(errors.square().mean())) if errors.numel() else 0.0
    return value if math.isfinite(value) else None

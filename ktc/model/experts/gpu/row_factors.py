"""LoRA of one product for the rows of a chunk of experts, and the results of the activation's backward.

Both implementations of what is beside grouped products have them: `row_kernels.py` and `row_steps.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RunFactors(NamedTuple):
    """The factors of G neighbouring experts: `a` (G, r, inputs), which has the scale, and `b` (G, outputs, r).

    `bits` say which inputs A reads (`DroppedInputs.bits`), None: all.
    """

    a: Tensor
    b: Tensor
    bits: Tensor | None

    @property
    def rank(self) -> int:
        """The number of columns of B, those of zeros too."""
        return self.a.shape[1]


BothFactors = tuple[RunFactors | None, RunFactors | None]  # of gate_up and of down


class Inner(NamedTuple):
    """The parts of gate and up: a product (S, parts * I), A's result (S, r), and the bias (G, parts * I)."""

    product: Tensor
    low: Tensor | None
    bias: Tensor | None


class GivenGradients(NamedTuple):
    """The gradients (S, I) of down's input without LoRA, (S, r) of the values between its factors, and weights (S,).

    Neither gradient contains the routing weights yet.
    """

    d_h: Tensor
    d_down_low: Tensor | None
    weights: Tensor


class ActivationGradients(NamedTuple):
    """The results of the activation's backward.

    `d_inner` (S, parts * I) is the gradient of gate and up, `d_low` (S, r) that of the values between their factors,
    and `d_weights` (S,) that of the routing weights. Of an adapted product with down, `h` (S, I) is what A reads,
    `weighted` (S, r) and `d_weighted` (S, r) are the values between the factors and their gradients, times the weights.
    """

    h: Tensor | None
    d_inner: Tensor
    d_low: Tensor | None
    d_weights: Tensor
    weighted: Tensor | None
    d_weighted: Tensor | None

"""The steps of a chunk of experts beside grouped products, by PyTorch: the definition of `row_kernels.py`.

On a GPU without that module's kernels, functions without products are compiled. The derivative of the activation is
that of the reference's own function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from ktc.model.experts.gpu.compiled_functions import compiled_on
from ktc.model.experts.gpu.row_factors import ActivationGradients, BothFactors, GivenGradients, Inner, RunFactors
from ktc.model.experts.gpu.slots import Rows
from ktc.model.experts.products.grouped_products import outer, times_columns, times_rows
from ktc.model.experts.references.reference import activated as reference_activation
from ktc.model.experts.trained.lora_dropout import kept_only
from ktc.model.kernels.form import ExpertsForm

_WithDerivative = tuple[Tensor, Callable[[Tensor], tuple[Tensor]]]


def gathered(x: Tensor, rows: Rows, factors: RunFactors | None, *, by_b: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return the rows of tokens and their products with A, or with the transpose of B: `(T, C) -> (S, C), (S, r)`."""
    x = x.index_select(0, rows.tokens)
    if factors is None:
        return x, None
    return x, times_columns(x, factors.b, rows.ends) if by_b else times_rows(read(x, factors), factors.a, rows.ends)


def activated(form: ExpertsForm, inner: Inner, factors: BothFactors, rows: Rows) -> tuple[Tensor, Tensor | None]:
    """Return the activation and its product with A of down, `(S, I), (S, r)`."""
    product, down = inner.product, factors[1]
    h = compiled_on(product.device, _activation(form))(*_summands(inner, factors[0], rows))
    return h, None if down is None else times_rows(read(h, down), down.a, rows.ends)


def activated_backward(
    form: ExpertsForm, inner: Inner, factors: BothFactors, rows: Rows, given: GivenGradients
) -> ActivationGradients:
    """Return the gradients of gate and up, and what those of factors are made of."""
    (first, down), (d_h, d_down_low, weights), of_adapter = factors, given, None
    if down is not None and d_down_low is not None:
        of_adapter = read(times_columns(d_down_low, down.a, rows.ends), down)
    backward = compiled_on(d_h.device, _activation_backward(form))
    h, d_inner, d_weights = backward(d_h, of_adapter, weights, *_summands(inner, first, rows))
    d_low = None if first is None else times_columns(d_inner, first.b, rows.ends)
    if down is None or d_down_low is None:
        return ActivationGradients(None, d_inner, d_low, d_weights, None, None)
    of_rows = weights[:, None].to(h.dtype)  # on the narrow side of each outer product
    h = read(h, down)
    return ActivationGradients(
        h, d_inner, d_low, d_weights, times_rows(h, down.a, rows.ends) * of_rows, d_down_low * of_rows
    )


def put_outer(target: Tensor, narrow: Tensor, wide: Tensor, rows: Rows, scale: float) -> None:
    """Put the sums of outer products of each expert's rows to `target`: `(S, r), (S, C) -> (G, rank, C)`, times scale.

    Lanes beyond the rank of the target are left out.
    """
    target.copy_(outer(narrow, wide, rows.ends)[:, : target.shape[1]])
    if scale != 1:
        target.mul_(scale)


def read(x: Tensor, factors: RunFactors) -> Tensor:
    """Return `x`, or the gradient of what A reads, without what is dropped: (S, inputs) -> (S, inputs)."""
    return x if factors.bits is None else compiled_on(x.device, kept_only)(x, factors.bits)


def rounded_sum(product: Tensor, added: Tensor | None, bias: Tensor | None, experts: Tensor | None) -> Tensor:
    """Add LoRA's product and the bias of each row's expert, rounded once, to the dtype of the product."""
    return _sum(product, added, bias, experts).to(product.dtype)


def _summands(
    inner: Inner, first: RunFactors | None, rows: Rows
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the product, LoRA's product, the bias, and the experts of the rows."""
    added = None if first is None or inner.low is None else times_rows(inner.low, first.b, rows.ends)
    return inner.product, added, inner.bias, None if inner.bias is None else rows.experts


@functools.cache
def _activation(form: ExpertsForm) -> Callable[..., Tensor]:
    def activation(gate_up: Tensor, added: Tensor | None, bias: Tensor | None, experts: Tensor | None) -> Tensor:
        return reference_activation(form, _sum(gate_up, added, bias, experts)).to(gate_up.dtype)

    return activation


@functools.cache
def _activation_backward(form: ExpertsForm) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    def backward(
        d_h: Tensor, d_h_of_adapter: Tensor | None, weights: Tensor, gate_up: Tensor, added: Tensor | None,
        bias: Tensor | None, experts: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        dtype, inner = d_h.dtype, _sum(gate_up, added, bias, experts)
        h, derivative = cast("_WithDerivative", torch.func.vjp(functools.partial(reference_activation, form), inner))
        d_h = _sum(d_h, d_h_of_adapter, None, experts)
        d_weights = (h * d_h).sum(-1)
        (d_inner,) = derivative(d_h * weights[:, None].to(inner.dtype))
        return h.to(dtype), d_inner.to(dtype), d_weights

    return backward


def _sum(product: Tensor, added: Tensor | None, bias: Tensor | None, experts: Tensor | None) -> Tensor:
    total = product.to(torch.float64 if product.dtype == torch.float64 else torch.float32)
    if added is not None:
        total = total + added
    return total if bias is None else total + bias[experts]

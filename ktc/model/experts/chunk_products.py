"""The products of a chunk of experts, with LoRA on both, forward and backward.

In: rows sorted by expert and the matrices of neighbouring experts. Out: the outputs before routing weights; backward
the gradients of the rows, of the routing weights and of LoRA's factors. Products round to the dtype of the rows. The
activation between them is computed in fp32 (fp64 for fp64), which `torch.compile` makes one kernel on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ktc.model.experts.compiled_functions import compiled_on
from ktc.model.experts.grouped_products import outer, times_columns, times_rows
from ktc.model.experts.lora import ExpertsLora, Lora
from ktc.model.experts.lora_dropout import PRODUCTS, AdaptedProduct, Drop, DroppedInputs, bits_of, blocks_of, kept_only
from ktc.model.experts.packed_layout import Matrices
from ktc.model.experts.reference import activated
from ktc.model.experts.slots import Rows
from ktc.model.kernels.form import ExpertsForm

_WithDerivative = tuple[Tensor, Callable[[Tensor], tuple[Tensor]]]
_RANKS: Final = 8  # that a rank is filled up to with zeros: 16 bytes of bf16, as grouped products read them


class ChunkProducts:
    """The experts' products in one dtype, chunk after chunk. Backward of the last chunk completes `gradients`."""

    def __init__(self, form: ExpertsForm, lora: ExpertsLora, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._form = form
        self._gate_up, self._down = (
            None if factors is None else _Factors.of(factors, dtype, lora.drop, product)
            for factors, product in zip(lora.products, PRODUCTS, strict=True)
        )

    @property
    def gradients(self) -> tuple[Tensor | None, ...]:
        """The gradients of A and B of gate_up, and of A and B of down; None without LoRA."""
        both = (self._gate_up, self._down)
        return tuple(grad for factors in both for grad in ((None, None) if factors is None else factors.gradients))

    def forward(self, x: Tensor, rows: Rows, run: range, matrices: Matrices) -> Tensor:
        """Compute the outputs of rows, `(S, H) -> (S, H)`."""
        low = self._gate_up and self._gate_up.low(self._gate_up.read(x, self._gate_up.bits(rows)), rows, run)
        h = compiled_on(x.device, _activation(self._form))(*self._inner(x, low, rows, run, matrices)).to(x.dtype)
        added = None
        if self._down is not None:
            added = self._down.outputs(self._down.low(self._down.read(h, self._down.bits(rows)), rows, run), rows, run)
        return _plus(times_rows(h, matrices.down, rows.ends), added, matrices.down_bias, rows)

    def backward(
        self, x: Tensor, grad: Tensor, weights: Tensor, rows: Rows, run: range, matrices: Matrices
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of the rows and of their routing weights, `(S, H), (S, H), (S,) -> (S, H), (S,)`.

        `grad` is that of the layer's output, not yet multiplied by the routing weights.
        """
        bits, down_bits = (factors and factors.bits(rows) for factors in (self._gate_up, self._down))
        read = x if self._gate_up is None else self._gate_up.read(x, bits)
        low = self._gate_up and self._gate_up.low(read, rows, run)
        gate_up, down, _, _ = matrices = matrices.decoded(rows.ends)
        inner = self._inner(x, low, rows, run, matrices)
        d_h = times_columns(grad, down, rows.ends)
        d_down_low = self._down and self._down.d_low(grad, rows, run)
        of_adapter = None
        if self._down is not None and d_down_low is not None:
            of_adapter = self._down.read(self._down.inputs(d_down_low, rows, run), down_bits)
        backward = compiled_on(x.device, _activation_backward(self._form))
        h, d_inner, d_weights = backward(d_h, of_adapter, weights, *inner)
        h, d_inner = h.to(x.dtype), d_inner.to(x.dtype)
        if matrices.down_bias is not None:
            d_weights = d_weights + (matrices.down_bias[rows.experts] * grad).sum(-1)
        if self._down is not None and d_down_low is not None:
            of_rows = weights[:, None].to(x.dtype)  # on the narrow side of each outer product
            h = self._down.read(h, down_bits)
            self._down.add(h, self._down.low(h, rows, run) * of_rows, grad, d_down_low * of_rows, rows, run)
        d_x, of_adapter = times_columns(d_inner, gate_up, rows.ends), None
        if self._gate_up is not None and low is not None:
            d_low = self._gate_up.d_low(d_inner, rows, run)
            self._gate_up.add(read, low, d_inner, d_low, rows, run)
            of_adapter = self._gate_up.read(self._gate_up.inputs(d_low, rows, run), bits)
        return _plus(d_x, of_adapter, None, rows), d_weights

    def _inner(self, x: Tensor, low: Tensor | None, rows: Rows, run: range, matrices: Matrices) -> tuple[Any, ...]:
        """Return the inputs of the activation: the product, LoRA's product, the bias, and their experts."""
        added = None if self._gate_up is None or low is None else self._gate_up.outputs(low, rows, run)
        experts = None if matrices.gate_up_bias is None else rows.experts
        return times_rows(x, matrices.gate_up, rows.ends), added, matrices.gate_up_bias, experts


@dataclass(slots=True)
class _Factors:
    """LoRA of one product in the dtype of the rows: `a` (E, r, inputs) and `b` (E, outputs, r), and their gradients.

    The rank is filled up with zeros, which change no product. `a` is multiplied by `scale`. Inputs may be `dropped`.
    """

    a: Tensor
    b: Tensor
    scale: float
    d_a: Tensor
    d_b: Tensor
    dropped: DroppedInputs | None

    @classmethod
    def of(cls, lora: Lora, dtype: torch.dtype, drop: Drop | None, product: AdaptedProduct) -> _Factors:
        more = -lora.rank % _RANKS
        a, b = (lora.a.detach() * lora.scale).to(dtype), lora.b.detach().to(dtype)
        if more:
            a, b = F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more))
        gradients = torch.zeros_like(lora.a), torch.zeros_like(lora.b)
        dropped = drop and drop.of_product(product, a.device)
        return cls(a.contiguous(), b.contiguous(), lora.scale, *gradients, dropped)

    @property
    def gradients(self) -> tuple[Tensor, Tensor]:
        """The gradients of A and B."""
        return self.d_a * self.scale, self.d_b

    def bits(self, rows: Rows) -> Tensor | None:
        """Return what A reads of rows, as `DroppedInputs.bits`; None: all."""
        if self.dropped is None:
            return None
        dropped, device = self.dropped, rows.tokens.device
        blocks = blocks_of(self.a.shape[2], device)
        bits = compiled_on(device, bits_of)
        return bits(dropped.key, rows.tokens, rows.numbers, blocks, dropped.product, dropped.below)

    def read(self, x: Tensor, bits: Tensor | None) -> Tensor:
        """Return `x`, or the gradient of what A reads, without what is dropped: (S, inputs) -> (S, inputs)."""
        return x if bits is None else compiled_on(x.device, kept_only)(x, bits)

    def low(self, x: Tensor, rows: Rows, run: range) -> Tensor:
        """`scale * A x`, (S, inputs) -> (S, r)."""
        return times_rows(x, self.a[run.start : run.stop], rows.ends)

    def outputs(self, low: Tensor, rows: Rows, run: range) -> Tensor:
        """`scale * B A x`, (S, r) -> (S, outputs)."""
        return times_rows(low, self.b[run.start : run.stop], rows.ends)

    def d_low(self, d_outputs: Tensor, rows: Rows, run: range) -> Tensor:
        """Return the gradient of `scale * A x`, (S, outputs) -> (S, r)."""
        return times_columns(d_outputs, self.b[run.start : run.stop], rows.ends)

    def inputs(self, d_low: Tensor, rows: Rows, run: range) -> Tensor:
        """Return the gradient of x, (S, r) -> (S, inputs)."""
        return times_columns(d_low, self.a[run.start : run.stop], rows.ends)

    def add(self, x: Tensor, low: Tensor, d_outputs: Tensor, d_low: Tensor, rows: Rows, run: range) -> None:
        """Store the gradients of `a` and `b` of a chunk's experts; `low` is `scale * A x`, `d_low` its gradient."""
        rank = self.d_a.shape[1]
        self.d_a[run.start : run.stop] = outer(d_low, x, rows.ends)[:, :rank]
        self.d_b[run.start : run.stop] = outer(d_outputs, low, rows.ends)[..., :rank]


@functools.cache
def _activation(form: ExpertsForm) -> Callable[..., Tensor]:
    def activation(gate_up: Tensor, added: Tensor | None, bias: Tensor | None, experts: Tensor | None) -> Tensor:
        return activated(form, _sum(gate_up, added, bias, experts))

    return activation


@functools.cache
def _activation_backward(form: ExpertsForm) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    def backward(
        d_h: Tensor, d_h_of_adapter: Tensor | None, weights: Tensor, gate_up: Tensor, added: Tensor | None,
        bias: Tensor | None, experts: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        inner = _sum(gate_up, added, bias, experts)
        h, derivative = cast("_WithDerivative", torch.func.vjp(functools.partial(activated, form), inner))
        d_h = _sum(d_h, d_h_of_adapter, None, experts)
        d_weights = (h * d_h).sum(-1)
        (d_inner,) = derivative(d_h * weights[:, None].to(inner.dtype))
        return h, d_inner, d_weights

    return backward


def _plus(product: Tensor, added: Tensor | None, bias: Tensor | None, rows: Rows) -> Tensor:
    """Add LoRA's product and the bias of each row's expert, rounded once, to the dtype of the product."""
    if bias is None:  # one addition is rounded once anyway
        return product if added is None else product.add_(added)
    return compiled_on(product.device, _rounded_sum)(product, added, bias, rows.experts)


def _rounded_sum(product: Tensor, added: Tensor | None, bias: Tensor | None, experts: Tensor | None) -> Tensor:
    return _sum(product, added, bias, experts).to(product.dtype)


def _sum(product: Tensor, added: Tensor | None, bias: Tensor | None, experts: Tensor | None) -> Tensor:
    total = product.to(torch.float64 if product.dtype == torch.float64 else torch.float32)
    if added is not None:
        total = total + added
    return total if bias is None else total + bias[experts]

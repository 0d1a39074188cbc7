"""The products of a chunk of experts, with LoRA on both, forward and backward.

In: hidden states, which rows neighbouring experts have, and their matrices. Out: the outputs before routing weights;
backward the gradients of the rows, of the routing weights and of LoRA's factors. Products round to the dtype of the
rows. The steps beside grouped products are computed in fp32 (fp64 for fp64): by kernels that read and write rows once
where a device has them (`row_kernels.py`), otherwise by PyTorch (`row_steps.py`).

Codes that are decoded for a product get LoRA's wide factor beside them, or its narrow one below: one product with a
longer sum is then the layer's and LoRA's.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Final, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ktc.model.experts.gpu.compiled_functions import compiled_on
from ktc.model.experts.gpu.row_factors import ActivationGradients, BothFactors, GivenGradients, Inner, RunFactors
from ktc.model.experts.gpu.slots import Rows
from ktc.model.experts.products import row_steps
from ktc.model.experts.products.grouped_products import (
    decoded_below,
    decoded_beside,
    is_decoded,
    multiplies_codes,
    times_columns,
    times_rows,
)  # fmt: skip
from ktc.model.experts.products.packed_layout import Matrices
from ktc.model.experts.trained.lora import ExpertsLora, Lora
from ktc.model.experts.trained.lora_dropout import PRODUCTS, AdaptedProduct, Drop, DroppedInputs, bits_of, blocks_of
from ktc.model.kernels.form import ExpertsForm

_RANKS: Final = 8  # that a rank is filled up to with zeros: 16 bytes of bf16, as grouped products read them
_LINE: Final = 64  # values of bf16 in a line of a GPU's cache: what is behind a row fills whole lines


class ChunkProducts:
    """The experts' products in one dtype, chunk after chunk. Backward of the last chunk completes `gradients`.

    With `keeps_first`, backward of these products does not compute gate and up again.
    """

    def __init__(self, form: ExpertsForm, lora: ExpertsLora, dtype: torch.dtype, *, keeps_first: bool = False) -> None:
        self.dtype = dtype
        self._keeps_first = keeps_first
        self._first: dict[range, Tensor] = {}  # the products of gate and up, by chunk
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

    def forward(self, x_TH: Tensor, rows: Rows, run: range, matrices: Matrices) -> Tensor:
        """Compute the outputs of rows, `(T, H) -> (S, H)`."""
        steps, factors = steps_on(x_TH.device, self.dtype), self._factors(rows, run)
        first, down = factors
        x, low = steps.gathered(x_TH, rows, first)
        inner = Inner(times_rows(x, matrices.gate_up, rows.ends), low, matrices.gate_up_bias)
        if self._keeps_first:
            self._first[run] = inner.product
        joined = None
        if steps is not row_steps and down is not None and is_decoded(matrices.down, rows.tokens, rows.ends):
            joined = decoded_beside(matrices.down, down.b, rows.ends, _padding(down))
        if joined is not None:
            h, _ = steps.activated(self._form, inner, factors, rows, padding=_padding(down))
            return _plus(times_rows(_with_narrow(h, down), joined, rows.ends), None, matrices.down_bias, rows)
        h, down_low = steps.activated(self._form, inner, factors, rows)
        added = None if down is None or down_low is None else times_rows(down_low, down.b, rows.ends)
        return _plus(times_rows(h, matrices.down, rows.ends), added, matrices.down_bias, rows)

    def backward(
        self, x_TH: Tensor, grad_TH: Tensor, weights: Tensor, rows: Rows, run: range, matrices: Matrices
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of the rows and of their routing weights, `(T, H), (T, H), (S,) -> (S, H), (S,)`.

        `grad_TH` is that of the layer's output, not yet multiplied by the routing weights.
        """
        steps, factors = steps_on(x_TH.device, self.dtype), self._factors(rows, run)
        first, down = factors
        x, low = steps.gathered(x_TH, rows, first)
        grad, d_down_low = steps.gathered(grad_TH, rows, down, by_b=True)
        joins = steps is not row_steps and first is not None and first.bits is None
        below = first.a if joins and first is not None else None
        gate_up, joined = decoded_below(matrices.gate_up, below, rows.ends)
        product = self._first.pop(run, None)
        product = times_rows(x, gate_up, rows.ends) if product is None else product
        inner = Inner(product, low, matrices.gate_up_bias)
        given = GivenGradients(times_columns(grad, matrices.down, rows.ends), d_down_low, weights)
        more = {"padding": _padding(first)} if joined is not None else {}
        made = cast("ActivationGradients", steps.activated_backward(self._form, inner, factors, rows, given, **more))
        d_weights = made.d_weights
        if matrices.down_bias is not None:
            d_weights = d_weights + (matrices.down_bias[rows.experts] * grad).sum(-1)
        self._add(x, grad, low, made, factors, rows, run)
        if joined is not None:
            return times_columns(_with_narrow(made.d_inner, first), joined, rows.ends), d_weights
        of_adapter = None
        if first is not None and made.d_low is not None:
            of_adapter = row_steps.read(times_columns(made.d_low, first.a, rows.ends), first)
        return _plus(times_columns(made.d_inner, gate_up, rows.ends), of_adapter, None, rows), d_weights

    def _factors(self, rows: Rows, run: range) -> BothFactors:
        first, down = (factors and factors.of_run(rows, run) for factors in (self._gate_up, self._down))
        return first, down

    def _add(
        self, x: Tensor, grad: Tensor, low: Tensor | None, made: ActivationGradients, factors: BothFactors, rows: Rows,
        run: range,
    ) -> None:  # fmt: skip
        """Store the gradients of the factors of a chunk's experts."""
        steps, (first, _) = steps_on(x.device, self.dtype), factors
        if self._down is not None:
            assert made.h is not None and made.weighted is not None and made.d_weighted is not None
            d_a, d_b = self._down.gradients_of(run)
            steps.put_outer(d_a, made.d_weighted, made.h, rows, self._down.lora.scale)
            steps.put_outer(d_b, made.weighted, grad, rows, 1.0)
        if self._gate_up is not None and first is not None:
            assert low is not None and made.d_low is not None
            d_a, d_b = self._gate_up.gradients_of(run)
            steps.put_outer(d_a, made.d_low, row_steps.read(x, first), rows, self._gate_up.lora.scale)
            steps.put_outer(d_b, low, made.d_inner, rows, 1.0)


def steps_on(device: torch.device, dtype: torch.dtype) -> ModuleType:
    """Return what computes the rest beside grouped products: `row_kernels` or `row_steps`."""
    if dtype == torch.bfloat16 and multiplies_codes(device):
        from ktc.model.experts.gpu import row_kernels

        return row_kernels
    return row_steps


@dataclass(slots=True)
class _Factors:
    """LoRA of one product in the dtype of the rows: `a` (E, r, inputs) and `b` (E, outputs, r), and their gradients.

    The rank is filled up with zeros, which change no product. `a` is multiplied by the scale of `lora`. Inputs may be
    `dropped`. Gradients are as `lora` has its factors in memory.
    """

    a: Tensor
    b: Tensor
    lora: Lora
    dropped: DroppedInputs | None
    d_a: Tensor | None = None
    d_b: Tensor | None = None

    @classmethod
    def of(cls, lora: Lora, dtype: torch.dtype, drop: Drop | None, product: AdaptedProduct) -> _Factors:
        more = -lora.rank % _RANKS
        a, b = (lora.a.detach() * lora.scale).to(dtype), lora.b.detach().to(dtype)
        if more:
            a, b = F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more))
        return cls(a.contiguous(), b.contiguous(), lora, drop and drop.of_product(product, a.device))

    @property
    def gradients(self) -> tuple[Tensor, Tensor]:
        """The gradients of A and B."""
        if self.d_a is None or self.d_b is None:  # no expert had a row
            return torch.zeros_like(self.lora.a), torch.zeros_like(self.lora.b)
        return self.d_a, self.d_b

    def of_run(self, rows: Rows, run: range) -> RunFactors:
        """Return the factors of neighbouring experts, and what A reads of their rows."""
        experts = slice(run.start, run.stop)
        return RunFactors(self.a[experts], self.b[experts], self._bits(rows))

    def _bits(self, rows: Rows) -> Tensor | None:
        """Return what A reads of rows, as `DroppedInputs.bits`; None: all."""
        if self.dropped is None:
            return None
        dropped, device = self.dropped, rows.tokens.device
        blocks = blocks_of(self.a.shape[2], device)
        bits = compiled_on(device, bits_of)
        return bits(dropped.key, rows.tokens, rows.numbers, blocks, dropped.product, dropped.below)

    def gradients_of(self, run: range) -> tuple[Tensor, Tensor]:
        """Return where the gradients of a chunk's experts are to be put, (G, rank, inputs) and (G, rank, outputs)."""
        if self.d_a is None or self.d_b is None:
            like = torch.empty_like if len(run) == len(self.a) else torch.zeros_like
            self.d_a, self.d_b = like(self.lora.a), like(self.lora.b)
        return self.d_a[run.start : run.stop], self.d_b[run.start : run.stop].transpose(1, 2)


def _padding(factors: RunFactors | None) -> int:
    """Return how many values longer rows are that have narrow values behind them."""
    return 0 if factors is None else -(-factors.rank // _LINE) * _LINE


def _with_narrow(rows: Tensor, factors: RunFactors | None) -> Tensor:
    """Return rows (S, C) with the narrow values that are behind them: (S, C + r)."""
    assert factors is not None, "narrow values are behind rows of an adapted product"
    return rows.as_strided((len(rows), rows.shape[1] + factors.rank), rows.stride())


def _plus(product: Tensor, added: Tensor | None, bias: Tensor | None, rows: Rows) -> Tensor:
    """Add LoRA's product and the bias of each row's expert, rounded once, to the dtype of the product."""
    if bias is None:  # one addition is rounded once anyway
        return product if added is None else product.add_(added)
    return compiled_on(product.device, row_steps.rounded_sum)(product, added, bias, rows.experts)

"""The CPU backend of experts whose packed weights change: trained ones, and those that an adapter is merged into.

The layer's weights are packed once after each change, so the micro-batches of a step share them. Forward and the
gradients of hidden states and routing weights are the kernel's. The gradient of a weight matrix is a product over the
slots of its expert, of rows that the kernel writes too. PyTorch multiplies them, one expert after the other, in the
dtype of the kernel's sums. With a merged adapter, these gradients become those of its factors at once:
dA = s B^T dW, dB = s dW A^T.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.experts.backends.any_top_k import with_top_k
from ktc.model.experts.backends.cpu_backend import Activations
from ktc.model.experts.backends.tracing import never_traced
from ktc.model.experts.host.staging import HostBackend, on_host
from ktc.model.experts.layouts.packed import PackedExperts, SlotRows
from ktc.model.experts.trained.lora import ExpertsLora, Lora
from ktc.model.experts.trained.weight_training import State
from ktc.model.experts.weights import ExpertsWeights
from ktc.model.kernels.step_context import StepContext


@dataclass(frozen=True, slots=True)
class Trained(HostBackend):
    """The kernel on the weights of a layer as they are now."""

    weights: ExpertsWeights
    activations: Activations
    context: StepContext

    def run(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, lora: ExpertsLora) -> Tensor:
        """See `ExpertsBackend.run`; differentiable in weights that train too."""
        return on_host(self._compute, x_TH, index_TK, weights_TK, lora)

    @never_traced
    def _compute(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, lora: ExpertsLora) -> Tensor:
        packed = self.weights.current(lora)
        call = functools.partial(self._call, packed, lora)
        return with_top_k(packed.sizes.top_k, call, x_TH, index_TK, weights_TK)

    def _call(
        self, packed: PackedExperts, lora: ExpertsLora, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        x, index, weights = packed.inputs(x_TH, index_TK, weights_TK)
        stock = tuple(self.weights.stock.values())
        trained = (x_TH, weights_TK, *stock, *(factor for factor in lora.factors if factor is not None))
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in trained):
            call = _Call(self.weights, packed, self.activations == "keep", lora, self.weights.packed_from)
            out_TH = cast("Tensor", _Experts.apply(call, index, x, weights, *lora.factors, *stock))
        else:
            out_TH, _ = packed.forward(
                x, index, weights, save=False, lora=self.weights.beside(lora),
                interleaved=self.weights.form.interleaved, context=self.context,
            )  # fmt: skip
        return out_TH.to(x_TH.dtype)

    def saved_bytes(self, gate_up_rank: int, down_rank: int) -> int:
        """Count the input, the low-rank values, and gate and up where they are kept."""
        packed = self.weights.packed
        assert packed is not None, "a kernel packs these weights"
        if self.weights.training.merged:
            gate_up_rank = down_rank = 0
        kept = packed.saved_bytes(gate_up_rank, down_rank) if self.activations == "keep" else 0
        return kept + packed.dtype.itemsize * packed.sizes.hidden


@dataclass(frozen=True, slots=True)
class _Call:
    """A call, for its backward. `state` is that of the parameters when forward ran."""

    weights: ExpertsWeights
    packed: PackedExperts
    keep: bool
    lora: ExpertsLora
    state: State | None

    def with_factors(self, factors: Sequence[Tensor | None]) -> ExpertsLora:
        """Return the adapters of the call with the factors that autograd gives."""
        return ExpertsLora.of(factors, self.lora.scales, self.lora.drop)


def _changed(fqn: str) -> Diagnostic:
    message = f"the weights of `{fqn}` changed between the forward and the backward of one call"
    hint = (
        "an optimizer step, or a call with other adapters, belongs after the backward; for a loss with a reference "
        "model, compute the reference's values first (TRL: `precompute_ref_log_probs`)"
    )
    return Diagnostic("L464", message, hint=hint)


_BEFORE_FACTORS = 4  # arguments of `_Experts`


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, index: Tensor, x: Tensor, weights: Tensor, *others: Tensor | None) -> Tensor:
        lora = call.with_factors(others[:4])
        out, saved = call.packed.forward(
            x, index, weights, save=call.keep, lora=call.weights.beside(lora),
            interleaved=call.weights.form.interleaved,
        )  # fmt: skip
        ctx.call = call
        ctx.save_for_backward(index, x, weights, saved, *others[:4])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        call = cast("_Call", ctx.call)
        index, x, weights, saved, *factors = ctx.saved_tensors
        if call.weights.packed_from != call.state:
            raise InputRefused(_changed(call.weights.fqn))
        lora, packed, form = call.with_factors(factors), call.packed, call.weights.form
        wants = ctx.needs_input_grad[_BEFORE_FACTORS:]
        merged = call.weights.training.merged and any(wants[:4])
        rows = None
        if merged or any(wants[4:]):
            parts = 2 if form.gated else 1
            rows = SlotRows.empty(index.numel(), parts, packed.sizes.intermediate, packed.dtype)
        grad = grad.contiguous()
        grad_x, grad_weights, of_lora = packed.backward(
            grad,
            (index, weights),
            saved=saved,
            x_TH=x,
            lora=call.weights.beside(lora),
            interleaved=form.interleaved,
            rows=rows,
        )
        of_factors, of_stock = list(of_lora.factors), list[Tensor | None]()
        if rows is not None:
            slots = _Slots(call.weights, rows, x, grad, index, weights)
            if merged:
                of_factors = list(slots.of_factors(lora).factors)
            of_stock = slots.of_stock() if any(wants[4:]) else []
        of_stock += [None] * (len(wants) - 4 - len(of_stock))
        others = (
            gradient if wanted else None for gradient, wanted in zip((*of_factors, *of_stock), wants, strict=True)
        )
        return None, None, grad_x, grad_weights, *others


@dataclass(frozen=True, slots=True)
class _Expert:
    """The gradients of one expert's matrices, (outputs, inputs) in the order of the stock weights' rows, and biases."""

    number: int
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor
    down_bias: Tensor


@dataclass(frozen=True, slots=True)
class _Slots:
    """The products over slots. `grad` (T, H) is the gradient of the output, `x` (T, H) the hidden states."""

    weights: ExpertsWeights
    rows: SlotRows
    x: Tensor
    grad: Tensor
    index: Tensor
    routing: Tensor

    def of_stock(self) -> list[Tensor | None]:
        """Return the gradients of the stock tensors, zeros for experts without tokens."""
        form, stock = self.weights.form, self.weights.stock
        gradients = [torch.zeros_like(tensor) for tensor in stock.values()]
        for expert in self._experts():
            given = (expert.gate_up, expert.down, expert.gate_up_bias, expert.down_bias)
            for total, gradient in zip(gradients, given, strict=False):
                total[expert.number] = gradient.t() if form.transposed and gradient.dim() == 2 else gradient
        return list(gradients)

    def of_factors(self, lora: ExpertsLora) -> ExpertsLora:
        """Return the gradients of a merged adapter's factors."""
        totals = lora.zeros(self.routing.dtype)
        for expert in self._experts():
            for factors, total, grad in zip(lora.products, totals.products, (expert.gate_up, expert.down), strict=True):
                if factors is not None and total is not None:
                    _reduce(expert.number, factors, total, grad)
        return totals

    def _experts(self) -> Iterator[_Expert]:
        """Yield the experts that have tokens. Autocast would round the rows."""
        with torch.autocast("cpu", enabled=False):
            yield from self._with_tokens()

    def _with_tokens(self) -> Iterator[_Expert]:
        top_k, dtype = self.index.shape[1], self.routing.dtype
        order = self.index.flatten().argsort(stable=True)
        counts = torch.bincount(self.index.flatten(), minlength=self.weights.sizes.num_experts)
        ends = cast("list[int]", counts.cumsum(0).tolist())
        inter, begin = self.weights.sizes.intermediate, 0
        for number, end in enumerate(ends):
            if begin < end:
                pairs = order[begin:end]
                tokens = pairs // top_k
                first = self.rows.d_first[begin:end, :, :inter].to(dtype)
                first = (first.transpose(1, 2) if self.weights.form.interleaved else first).flatten(1)
                out = self.grad[tokens].to(dtype) * self.routing.flatten()[pairs, None]
                activated = self.rows.activated[begin:end, :inter].to(dtype)
                yield _Expert(
                    number, first.t() @ self.x[tokens].to(dtype), out.t() @ activated, first.sum(0), out.sum(0)
                )
            begin = end


def _reduce(expert: int, factors: Lora, total: Lora, grad: Tensor) -> None:
    """Set dA and dB of one expert from the gradient of its matrix."""
    a, b = factors.a[expert].to(grad.dtype), factors.b[expert].to(grad.dtype)
    total.a[expert] = factors.scale * (b.t() @ grad)
    total.b[expert] = factors.scale * (grad @ a.t())

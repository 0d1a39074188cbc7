"""The streamed backend: a layer's experts on a GPU for many tokens, from the packed weights in host memory.

With thousands of tokens a GPU saves more time than sending it all experts of a layer takes.
Forward saves its input alone, in host memory. Backward sends the weights again and computes gate and up again.
Out: what the kernel computes, in the GPU's rounding. Refused: what `ExpertStream` refuses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ktc.experts.expert_stream import ExpertStream
from ktc.experts.form import ExpertsForm
from ktc.experts.lora import ExpertsLora
from ktc.experts.packed import PackedExperts
from ktc.experts.reference import check_routing, expert_output
from ktc.experts.tracing import never_traced


@dataclass(frozen=True, slots=True)
class Streamed:
    """The experts of `packed`, multiplied on `device`."""

    packed: PackedExperts
    form: ExpertsForm
    device: torch.device

    @never_traced
    def run(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, lora: ExpertsLora) -> Tensor:
        """See `ExpertsBackend.run`."""
        stream = ExpertStream(self.packed, self.form, self.device)
        out_TH = compute(stream, x_TH.to(self.packed.dtype), index_TK, weights_TK, lora)
        return out_TH.to(x_TH.device, x_TH.dtype)

    def saved_bytes(self, gate_up_rank: int, down_rank: int) -> int:
        """Return 0: forward saves only hidden states."""
        return 0


def compute(stream: ExpertStream, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, lora: ExpertsLora) -> Tensor:
    """Compute the layer's output on the stream's device, differentiable in hidden states, routing weights and factors.

    `(T, H), (T, K) int64, (T, K) -> (T, H)`, each on any device. Raises `IndexError` for an expert that does not exist.
    """
    check_routing(index_TK, stream.num_experts)
    moved = (None if factor is None else factor.to(stream.device) for factor in lora.factors)
    x, weights, index = (tensor.to(stream.device) for tensor in (x_TH, weights_TK, index_TK))
    with torch.autocast(stream.device.type, enabled=False):  # as the kernel, which computes in the experts' dtype
        return cast("Tensor", _StreamedExperts.apply(stream, lora.scales, index, x, weights, *moved))


@dataclass(frozen=True, slots=True)
class _Slots:
    """The pairs (token, k) sorted by expert: `tokens` and `pairs` (S,) int64, and where each expert's begin and end."""

    tokens: Tensor
    pairs: Tensor
    spans: dict[int, slice]

    @classmethod
    def of(cls, index_TK: Tensor, num_experts: int) -> _Slots:
        flat = index_TK.flatten()
        pairs = torch.argsort(flat, stable=True)
        spans: dict[int, slice] = {}
        end = 0
        counts = cast("list[int]", torch.bincount(flat, minlength=num_experts).tolist())
        for expert, count in enumerate(counts):
            if count:
                spans[expert] = slice(end, end + count)
            end += count
        return cls(pairs // index_TK.shape[1], pairs, spans)


class _StreamedExperts(torch.autograd.Function):
    """Forward keeps hidden states (in host memory), routing and factors; nothing of what it computed."""

    @staticmethod
    def forward(
        ctx: Any, stream: ExpertStream, scales: tuple[float, float], index: Tensor, x: Tensor, weights: Tensor,
        *factors: Tensor | None,
    ) -> Tensor:  # fmt: skip
        slots = _Slots.of(index, stream.num_experts)
        lora, flat = ExpertsLora.of(factors, scales), weights.flatten().to(_accumulator(x.dtype))
        out = torch.zeros(x.shape, dtype=flat.dtype, device=x.device)
        for expert, matrices in stream.each(tuple(slots.spans)):
            span = slots.spans[expert]
            tokens = slots.tokens[span]
            y = expert_output(stream.form, x.index_select(0, tokens), *matrices, expert, lora)
            out.index_add_(0, tokens, y.to(flat.dtype) * flat[slots.pairs[span], None])
        ctx.stream, ctx.scales, ctx.slots = stream, scales, slots
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(_on_host(x), weights, *factors)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        stream, slots = cast("ExpertStream", ctx.stream), cast("_Slots", ctx.slots)
        host_x, weights, *factors = ctx.saved_tensors
        x, (grad,) = host_x.to(stream.device, non_blocking=True), grads
        flat = weights.flatten().to(_accumulator(x.dtype))
        d_x = torch.zeros(x.shape, dtype=flat.dtype, device=x.device)
        d_flat = torch.zeros_like(flat)
        d_factors = [None if factor is None else torch.zeros_like(factor) for factor in factors]
        for expert, matrices in stream.each(tuple(slots.spans)):
            span = slots.spans[expert]
            tokens, pairs = slots.tokens[span], slots.pairs[span]
            with torch.enable_grad():
                rows = x.index_select(0, tokens).requires_grad_()
                own = [None if factor is None else factor[expert, None].requires_grad_() for factor in factors]
                y = expert_output(stream.form, rows, *matrices, 0, ExpertsLora.of(own, ctx.scales))
            d_out = grad.index_select(0, tokens)
            d_flat[pairs] = (y.detach().to(flat.dtype) * d_out).sum(-1)
            wanted = [rows, *(factor for factor in own if factor is not None)]
            d_y = (d_out * flat[pairs, None]).to(y.dtype)
            d_rows, *found = torch.autograd.grad(y, wanted, d_y)
            d_x.index_add_(0, tokens, d_rows.to(flat.dtype))
            for total, part in zip((each for each in d_factors if each is not None), found, strict=True):
                total[expert] = part[0]
        return None, None, None, d_x.to(x.dtype), d_flat.view_as(weights).to(weights.dtype), *d_factors


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _on_host(x: Tensor) -> Tensor:
    """Copy from a GPU to pinned memory, beside its other work."""
    if x.device.type != "cuda":
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)

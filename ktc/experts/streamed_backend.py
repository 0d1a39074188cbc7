"""The streamed backend: a layer's experts on a GPU for many tokens, from the packed weights in host memory.

With thousands of tokens a GPU saves more time than sending it all experts of a layer takes. Experts come in chunks, and
each matrix of a chunk is multiplied in one grouped product: two forward, three backward, those of LoRA beside them.
Forward saves its input alone, in host memory. Backward sends the weights again and computes gate and up again. The
gradient of a routing weight is <h, dh>, with h the input of down and dh its gradient before the weight, so that the
outputs of down are not computed again.
Out: what the kernel computes, in the GPU's rounding. Refused: what `ExpertStream` refuses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ktc.experts.chunk_products import ChunkProducts
from ktc.experts.expert_stream import ExpertStream
from ktc.experts.form import ExpertsForm
from ktc.experts.lora import ExpertsLora
from ktc.experts.packed import PackedExperts
from ktc.experts.reference import check_routing
from ktc.experts.slots import Slots
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


class _StreamedExperts(torch.autograd.Function):
    """Forward keeps hidden states (in host memory), routing and factors; nothing of what it computed."""

    @staticmethod
    def forward(
        ctx: Any, stream: ExpertStream, scales: tuple[float, float], index: Tensor, x: Tensor, weights: Tensor,
        *factors: Tensor | None,
    ) -> Tensor:  # fmt: skip
        slots = Slots.of(index, stream.num_experts)
        products = ChunkProducts(stream.form, ExpertsLora.of(factors, scales), x.dtype)
        sums = _accumulator(x.dtype)
        out, routing = torch.zeros(x.shape, dtype=sums, device=x.device), weights.to(sums)
        for run, matrices in stream.chunks(slots.chosen):
            rows = slots.of_experts(run)
            y = products.forward(x.index_select(0, rows.tokens), rows, run, matrices)
            out = slots.add(out, y, rows.first, routing)
        ctx.stream, ctx.scales, ctx.slots = stream, scales, slots
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(_on_host(x), weights, *factors)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        stream, slots = cast("ExpertStream", ctx.stream), cast("Slots", ctx.slots)
        host_x, weights, *factors = ctx.saved_tensors
        x, (grad,) = host_x.to(stream.device, non_blocking=True), grads
        products = ChunkProducts(stream.form, ExpertsLora.of(factors, ctx.scales), x.dtype)
        sums = _accumulator(x.dtype)
        flat = weights.flatten().to(sums)
        d_x, d_flat = torch.zeros(x.shape, dtype=sums, device=x.device), torch.zeros_like(flat)
        for run, matrices in stream.chunks(slots.chosen):
            rows = slots.of_experts(run)
            d_rows, d_weights = products.backward(
                x.index_select(0, rows.tokens), grad.index_select(0, rows.tokens).to(x.dtype), flat[rows.pairs], rows,
                run, matrices,
            )  # fmt: skip
            d_flat[rows.pairs] = d_weights  # each pair once
            d_x = slots.add(d_x, d_rows, rows.first)
        d_weights = d_flat.view_as(weights).to(weights.dtype)
        return None, None, None, d_x.to(x.dtype), d_weights, *products.gradients


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _on_host(x: Tensor) -> Tensor:
    """Copy from a GPU to pinned memory, beside its other work."""
    if x.device.type != "cuda":
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)

"""The CPU backend: a layer's experts by a built kernel, from packed weights in host memory.

A call with gradients, or under `torch.compile`, is the registered operator; any other calls the kernel directly.
A call with another number of experts per token than the kernel's is cut into rows of the kernel's number.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ktc.model.experts.backends.any_top_k import with_top_k
from ktc.model.experts.backends.autograd_op import fused_moe
from ktc.model.experts.host.staging import HostBackend, on_host
from ktc.model.experts.layouts.packed import PackedExperts
from ktc.model.experts.trained.lora import ExpertsLora
from ktc.model.kernels.form import ExpertsForm
from ktc.model.kernels.step_context import StepContext

Activations = Literal["keep", "recompute"]  # whether gate and up of every slot are saved for backward


@dataclass(frozen=True, slots=True)
class CpuKernel(HostBackend):
    """The kernel of `packed`; `dtype` is that of the model's hidden states."""

    packed: PackedExperts
    form: ExpertsForm
    dtype: torch.dtype
    activations: Activations
    context: StepContext | None = None

    def run(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, lora: ExpertsLora) -> Tensor:
        """See `ExpertsBackend.run`."""
        return on_host(self._compute, x_TH, index_TK, weights_TK, lora)

    def _compute(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, lora: ExpertsLora) -> Tensor:
        call = functools.partial(self._call, lora)
        return with_top_k(self.packed.sizes.top_k, call, x_TH, index_TK, weights_TK)

    def _call(self, lora: ExpertsLora, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        wants_grad = x_TH.requires_grad or weights_TK.requires_grad or lora.requires_grad
        wants_grad = wants_grad and torch.is_grad_enabled()
        packed, interleaved = self.packed, self.form.interleaved
        x, index, weights = packed.inputs(x_TH, index_TK, weights_TK)
        if wants_grad or torch.compiler.is_compiling():
            keep = wants_grad and self.activations == "keep"
            out_TH = fused_moe(packed, x, index, weights, lora, interleaved=interleaved, keep=keep)
        else:
            out_TH, _ = packed.forward(
                x, index, weights, save=False, lora=lora, interleaved=interleaved, context=self.context
            )
        return out_TH.to(x_TH.dtype)

    def saved_bytes(self, gate_up_rank: int, down_rank: int) -> int:
        """Count the input, the low-rank values, and gate and up where they are kept."""
        sizes = self.packed.sizes
        kept = self.packed.saved_bytes(gate_up_rank, down_rank) if self.activations == "keep" else 0
        return kept + self.dtype.itemsize * sizes.hidden + 4 * sizes.top_k * (gate_up_rank + down_rank)

"""The reference backend: a layer's experts in plain PyTorch on the host, from stock tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ktc.model.experts.backends.tracing import never_traced
from ktc.model.experts.host.staging import HostBackend, on_host
from ktc.model.experts.references.reference import fused_moe_reference
from ktc.model.experts.trained.lora import ExpertsLora
from ktc.model.experts.weights import ExpertsWeights


@dataclass(frozen=True, slots=True)
class Reference(HostBackend):
    """`fused_moe_reference` on the stock tensors of a layer."""

    weights: ExpertsWeights

    def run(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, lora: ExpertsLora) -> Tensor:
        """See `ExpertsBackend.run`."""
        return on_host(self._compute, x_TH, index_TK, weights_TK, lora)

    @never_traced
    def _compute(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, lora: ExpertsLora) -> Tensor:
        tensors = self.weights.effective(lora).values()
        stock = [tensor.to(torch.promote_types(tensor.dtype, x_TH.dtype)) for tensor in tensors]
        lora = self.weights.beside(lora)
        return fused_moe_reference(x_TH, index_TK, weights_TK, stock, self.weights.form, lora=lora)

    def saved_bytes(self, gate_up_rank: int, down_rank: int) -> int:
        """Estimate the bytes that autograd saves: the input, and five values per unit of a chosen expert."""
        _, hidden, intermediate, top_k = self.weights.sizes
        values = hidden + 5 * top_k * intermediate
        return values * self.weights.dtype.itemsize + 4 * top_k * (gate_up_rank + down_rank)

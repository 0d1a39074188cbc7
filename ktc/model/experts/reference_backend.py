"""The reference backend: a layer's experts in plain PyTorch on the host, from stock tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ktc.model.experts.lora import NO_LORA, ExpertsLora
from ktc.model.experts.reference import fused_moe_reference
from ktc.model.experts.staging import on_host
from ktc.model.experts.tracing import never_traced
from ktc.model.experts.weights import ExpertsWeights


@dataclass(frozen=True, slots=True)
class Reference:
    """`fused_moe_reference` on the stock tensors of a layer."""

    weights: ExpertsWeights

    @property
    def device(self) -> torch.device:
        """The host."""
        return torch.device("cpu")

    def run(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, lora: ExpertsLora) -> Tensor:
        """See `ExpertsBackend.run`."""
        return on_host(self._compute, x_TH, index_TK, weights_TK, lora)

    @never_traced
    def _compute(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, lora: ExpertsLora) -> Tensor:
        gate_up, down, *biases = (
            each.to(torch.promote_types(each.dtype, x_TH.dtype)) for each in self.weights.effective(lora).values()
        )
        if self.weights.training.merged:
            lora = NO_LORA
        return fused_moe_reference(x_TH, index_TK, weights_TK, gate_up, down, self.weights.form, *biases, lora=lora)

    def prepare(self) -> None:
        """Do nothing: the weights are already there."""

    def saved_bytes(self, gate_up_rank: int, down_rank: int) -> int:
        """Estimate the bytes that autograd saves: the input, and five values per unit of a chosen expert."""
        _, hidden, intermediate, top_k = self.weights.sizes
        values = hidden + 5 * top_k * intermediate
        return values * self.weights.dtype.itemsize + 4 * top_k * (gate_up_rank + down_rank)

"""The backend of a step that becomes a CUDA graph: a layer's experts by their kernel on the CPU, as a host node.

In and out as of any backend, on the GPU, without gradients. Used within `HostNodes.recorded`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ktc.model.experts.any_top_k import per_token, rows_of
from ktc.model.experts.host_node import HostNodes
from ktc.model.experts.lora import ExpertsLora
from ktc.model.experts.packed import PackedExperts
from ktc.model.kernels.form import ExpertsForm


@dataclass(frozen=True, slots=True)
class HostNode:
    """The kernel of `packed`, called by the stream of a GPU."""

    packed: PackedExperts
    form: ExpertsForm
    nodes: HostNodes

    @property
    def device(self) -> torch.device:
        """The host."""
        return torch.device("cpu")

    def run(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, lora: ExpertsLora) -> Tensor:
        """See `ExpertsBackend.run`."""
        top_k, tokens, dtype = self.packed.sizes.top_k, x_TH.shape[0], x_TH.dtype
        fits = index_TK.shape[1] == top_k
        if not fits:
            x_TH, index_TK, weights_TK = rows_of(top_k, x_TH, index_TK, weights_TK)
        out = self.nodes.run(
            self.packed, x_TH.to(self.packed.dtype), index_TK, weights_TK.to(self.packed.weight_dtype), lora,
            interleaved=self.form.interleaved,
        )  # fmt: skip
        return (out if fits else per_token(out, tokens)).to(dtype)

    def prepare(self) -> None:
        """Do nothing: the weights are already there."""

    def saved_bytes(self, gate_up_rank: int, down_rank: int) -> int:
        """Return 0: there is no backward."""
        return 0

"""The backend of a step that becomes a CUDA graph: a layer's experts by their kernel on the CPU, as a host node.

In and out as of any backend, on the GPU, without gradients. Used within `HostNodes.recorded`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ktc.model.experts.backends.any_top_k import with_top_k
from ktc.model.experts.host.host_node import HostNodes
from ktc.model.experts.host.staging import HostBackend
from ktc.model.experts.layouts.packed import PackedExperts
from ktc.model.experts.trained.lora import ExpertsLora
from ktc.model.kernels.form import ExpertsForm


@dataclass(frozen=True, slots=True)
class HostNode(HostBackend):
    """The kernel of `packed`, called by the stream of a GPU."""

    packed: PackedExperts
    form: ExpertsForm
    nodes: HostNodes

    def run(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, lora: ExpertsLora) -> Tensor:
        """See `ExpertsBackend.run`. Raises `RuntimeError` for factors on a GPU: a graph keeps addresses of the host.

        The same for dropout, of which a graph would keep the seed.
        """
        if lora.drop is not None:
            raise RuntimeError("the adapters of its experts drop inputs, as in training")
        if any(factor is not None and factor.device.type != "cpu" for factor in lora.factors):
            raise RuntimeError("the adapters of its experts are on a GPU, where they train")

        def call(*rows: Tensor) -> Tensor:
            inputs = self.packed.inputs(*rows)
            return self.nodes.run(self.packed, *inputs, lora, interleaved=self.form.interleaved)

        return with_top_k(self.packed.sizes.top_k, call, x_TH, index_TK, weights_TK).to(x_TH.dtype)

    def run_some(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Call the experts without LoRA, but not where `index_TK` is `COMPUTED_ELSEWHERE`: that adds nothing."""

        def call(*rows: Tensor) -> Tensor:
            inputs = self.packed.inputs(*rows)
            return self.nodes.run_rest(self.packed, *inputs, beside=None)

        return with_top_k(self.packed.sizes.top_k, call, x_TH, index_TK, weights_TK).to(x_TH.dtype)

    def saved_bytes(self, gate_up_rank: int, down_rank: int) -> int:
        """Return 0: there is no backward."""
        return 0

"""The backend of a captured step whose experts are on three engines: GPU memory, the bus and the CPU.

In and out as of any backend, on the GPU, without gradients. Few rows without LoRA are split: the GPU computes experts
that it keeps and a share of the others, which it reads from host memory by itself, while the CPU computes the rest as a
host node. Of one expert both compute a part. The results are added, the GPU's to the CPU's. The host node computes all
other calls.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from ktc.model.experts.backends.any_top_k import with_top_k
from ktc.model.experts.backends.graph_backend import HostNode
from ktc.model.experts.host.staging import HostBackend
from ktc.model.experts.kept.chosen_experts import by_address
from ktc.model.experts.kept.kept_experts import MOST_ROWS, KeptLayer
from ktc.model.experts.trained.lora import ExpertsLora


@dataclass(frozen=True, slots=True)
class SplitNode(HostBackend):
    """The experts of `host`'s layer, some of which a GPU keeps."""

    host: HostNode
    kept: KeptLayer

    def run(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, lora: ExpertsLora) -> Tensor:
        """See `ExpertsBackend.run`."""
        is_elsewhere = x_TH.device != self.kept.table.device
        if is_elsewhere or any(lora.products) or len(x_TH) > MOST_ROWS:
            return self.host.run(x_TH, index_TK, weights_TK, lora)
        with torch.autocast(x_TH.device.type, enabled=False):  # as the kernel, which computes in the experts' dtype
            computed = with_top_k(self.kept.packed.sizes.top_k, self._call, x_TH, index_TK, weights_TK)
        return computed.to(x_TH.dtype)

    def _call(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        kept, store = self.kept, self.kept.store
        store.uses(self.host.nodes)
        x, index, weights = kept.packed.inputs(x_TH, index_TK, weights_TK)
        addresses, left = _kernels().split(
            index, kept.table, store.share, kept.counts, kept.traffic,
            (kept.packed.address, kept.layout.nbytes), kept.layout.cuts,
        )  # fmt: skip
        beside = functools.partial(by_address, kept.layout, x, addresses, weights)
        return self.host.nodes.run_rest(kept.packed, x, left, weights, beside)

    def saved_bytes(self, gate_up_rank: int, down_rank: int) -> int:
        """Return 0: there is no backward."""
        return 0


def _kernels() -> ModuleType:
    """Return what needs Triton."""
    from ktc.model.experts.gpu import kept_kernels

    return kept_kernels

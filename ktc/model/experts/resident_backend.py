"""The backend of few tokens whose experts are on a GPU already: a copy of each chosen expert, and one product of all.

In: packed weights that stay on a GPU, and a call without gradients and without LoRA. Out: what the kernel computes, in
the GPU's rounding, without waiting for the GPU: a CUDA graph may capture it. `Streamed` computes all other calls on the
same weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ktc.model.experts.chunk_products import ChunkProducts
from ktc.model.experts.expert_stream import ExpertStream, expert_stream
from ktc.model.experts.lora import NO_LORA, ExpertsLora
from ktc.model.experts.packed import PackedExperts
from ktc.model.experts.reference import check_routing
from ktc.model.experts.slots import Rows
from ktc.model.kernels.form import ExpertsForm


@dataclass(frozen=True, slots=True)
class ResidentFew:
    """The experts of `packed`, whose bytes stay on `device`."""

    packed: PackedExperts
    form: ExpertsForm
    device: torch.device

    def run(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, lora: ExpertsLora) -> Tensor:
        """See `ExpertsBackend.run`; `lora` must be none. An expert that does not exist is an error of a GPU itself."""
        assert not any(lora.products), "LoRA is computed by other backends"
        T, K = index_TK.shape
        if self.device.type == "cpu":  # a GPU would have to be waited for
            check_routing(index_TK, self.packed.sizes.num_experts)
        x, index, weights = (tensor.to(self.device) for tensor in (x_TH, index_TK, weights_TK))
        pairs = torch.arange(T * K, device=self.device)
        tokens = pairs // K
        rows = Rows(tokens, pairs, pairs, (pairs + 1).to(torch.int32), 0, T * K)
        products = ChunkProducts(self.form, NO_LORA, self.packed.dtype)
        with torch.autocast(self.device.type, enabled=False):  # as the kernel, which computes in the experts' dtype
            rows_SH = x.to(self.packed.dtype).index_select(0, tokens)
            y_SH = products.forward(rows_SH, rows, range(T * K), self._stream.copies(index.flatten()))
            sums = self.packed.weight_dtype
            out_TH = (y_SH.to(sums).view(T, K, x.shape[1]) * weights.to(sums)[..., None]).sum(1)
        return out_TH.to(x_TH.device, x_TH.dtype)

    @property
    def _stream(self) -> ExpertStream:
        return expert_stream(self.packed, self.form, self.device, resident=True)

    def prepare(self) -> None:
        """See `ExpertsBackend.prepare`."""
        self._stream.prepare()

    def saved_bytes(self, gate_up_rank: int, down_rank: int) -> int:
        """Return 0: there is no backward."""
        return 0

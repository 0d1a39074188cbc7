"""The backend of calls without gradients whose experts are on a GPU already.

Plain weights and codes are multiplied where they are. Few tokens, as in a decoding step, read the chosen experts alone
(`chosen_experts.py`). For others rows are sorted by expert, and one product serves all experts. Of formats whose codes
the GPU does not multiply, each chosen expert is decoded into a copy.

In: packed weights that stay on a GPU, and a call without gradients and without LoRA. Out: what the kernel computes, in
the GPU's rounding, without waiting for the GPU: a CUDA graph may capture it. `Streamed` computes all other calls on the
same weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ktc.model.experts.gpu.slots import Rows, Slots, sums_of_rows
from ktc.model.experts.kept.chosen_experts import are_few, by_address, by_number, reads_chosen
from ktc.model.experts.layouts.packed import PackedExperts
from ktc.model.experts.products.chunk_products import ChunkProducts
from ktc.model.experts.products.resident_weights import ResidentMatrices
from ktc.model.experts.references.reference import check_routing
from ktc.model.experts.streamed.expert_stream import ExpertStream, expert_stream
from ktc.model.experts.trained.lora import NO_LORA, ExpertsLora
from ktc.model.kernels.form import ExpertsForm


@dataclass(frozen=True, slots=True)
class GpuResident:
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
        with torch.autocast(self.device.type, enabled=False):  # as the kernel, which computes in the experts' dtype
            x = x.to(self.packed.dtype)
            is_few = are_few(T, K, self.packed.sizes.num_experts) and reads_chosen(self.packed, self.device)
            out_TH = (self._few if is_few else self._grouped)(x, index, weights, x_TH.dtype)
        return out_TH.to(x_TH.device, x_TH.dtype)

    def _few(self, x: Tensor, index: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiply the chosen experts where they are."""
        x, weights, resident, chosen = x.contiguous(), weights.contiguous(), self._stream.resident, index.flatten()
        if isinstance(resident, ResidentMatrices):
            places = resident.places.index_select(0, chosen)  # an error of the device for one that does not exist
            return by_number(self._stream.form, resident.whole(), x, places, weights, dtype)
        return by_address(resident.layout, x, chosen, weights, table=resident.places, dtype=dtype)

    def _grouped(self, x: Tensor, index: Tensor, weights: Tensor, _: torch.dtype) -> Tensor:
        """Sort the rows by expert, and multiply all experts in one product, or copies of the chosen ones."""
        products, resident = ChunkProducts(self.form, NO_LORA, self.packed.dtype), self._stream.resident
        if isinstance(resident, ResidentMatrices) or resident.is_multiplied:
            experts = range(self.packed.sizes.num_experts)
            slots, matrices = Slots.of(index, len(experts)), resident.whole()
            rows, places = slots.of_experts(experts), slots.places
        else:
            rows, places = _in_order(index)
            matrices, experts = resident.copies(index.flatten()), range(index.numel())
        y_SH = products.forward(x, rows, experts, matrices)
        sums = self.packed.weight_dtype
        return sums_of_rows(y_SH, places, weights.to(sums), 0, sums)

    @property
    def _stream(self) -> ExpertStream:
        return expert_stream(self.packed, self.form, self.device, resident=True)

    def prepare(self) -> None:
        """See `ExpertsBackend.prepare`."""
        self._stream.prepare()

    def saved_bytes(self, gate_up_rank: int, down_rank: int) -> int:
        """Return 0: there is no backward."""
        return 0


def _in_order(index: Tensor) -> tuple[Rows, Tensor]:
    """Return a row for each choice, each with a matrix of its own, and where the rows of a token are."""
    T, K = index.shape
    pairs = torch.arange(T * K, device=index.device)
    return Rows(pairs // K, pairs, pairs, (pairs + 1).to(torch.int32), 0, T * K), pairs.view(T, K)

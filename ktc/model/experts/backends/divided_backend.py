"""The backend of calls with more rows than a step, whose experts are on three engines: GPU memory, the bus and the CPU.

In and out as of any backend, on the GPU, without gradients and LoRA. The GPU multiplies experts that it keeps, and
those with many rows, whose bytes pass through the ring; the CPU computes the others meanwhile, as a host function
beside the stream (`kept_division.py`). The call waits for the GPU three times: for the rows of each expert, for those
that the GPU computes, and for the CPU's part. Calls from another device, and those that leave no expert to the GPU, are
the CPU's.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ktc.model.experts.backends.any_top_k import with_top_k
from ktc.model.experts.backends.cpu_backend import CpuKernel
from ktc.model.experts.backends.tracing import never_traced
from ktc.model.experts.gpu.slots import Slots
from ktc.model.experts.host.beside import SideStream
from ktc.model.experts.host.call_memory import CallMemory
from ktc.model.experts.host.host_node import launch_on
from ktc.model.experts.host.staging import HostBackend
from ktc.model.experts.kept.kept_division import Division, over_bus
from ktc.model.experts.kept.kept_experts import KeptLayer
from ktc.model.experts.products.chunk_products import ChunkProducts
from ktc.model.experts.references.kept_split import COMPUTED_ELSEWHERE
from ktc.model.experts.streamed.expert_stream import expert_stream
from ktc.model.experts.trained.lora import NO_LORA, ExpertsLora

_SIDE: Final = SideStream()  # CUDA has few streams, which it hands out in turn: another one might be the ring's


@dataclass(frozen=True, slots=True)
class Divided(HostBackend):
    """The experts of `host`'s layer, some of which a GPU keeps. Others pass through a ring of `buffer` bytes."""

    host: CpuKernel
    kept: KeptLayer
    division: Division
    buffer: int

    @never_traced
    def run(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, lora: ExpertsLora) -> Tensor:
        """See `ExpertsBackend.run`; `lora` must be none. Raises `IndexError` for an expert that does not exist."""
        if x_TH.device != self.kept.table.device:
            return self.host.run(x_TH, index_TK, weights_TK, lora)
        with torch.autocast(x_TH.device.type, enabled=False):  # as the kernel, which computes in the experts' dtype
            computed = with_top_k(self.kept.packed.sizes.top_k, self._call, x_TH, index_TK, weights_TK)
        return computed.to(x_TH.dtype)

    def _call(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        packed = self.kept.packed
        experts, left = self._on_gpu(Slots.of(index_TK, packed.sizes.num_experts))
        if not experts:
            return self.host.run(x_TH, index_TK, weights_TK, NO_LORA)
        x, index, weights = packed.inputs(x_TH, index_TK, weights_TK)
        places = torch.full((packed.sizes.num_experts,), len(experts))
        places[list(experts)] = torch.arange(len(experts))
        places = places.to(x.device)[index]  # among the experts of the GPU; the others behind them
        rest = _Rest(self, x, torch.where(places < len(experts), COMPUTED_ELSEWHERE, index), weights) if left else None
        try:
            computed = self._products(experts, Slots.of(places, len(experts) + 1), x, weights)
            return computed if rest is None else rest.added_to(computed)
        finally:
            if rest is not None:
                rest.finish()

    def _on_gpu(self, slots: Slots) -> tuple[Sequence[int], bool]:
        """Return the experts that the GPU computes, kept ones first, and whether some are left to the CPU."""
        bounds, near, chosen = slots.bounds, self.kept.near(), slots.chosen
        rows = [end - first for first, end in itertools.pairwise(bounds)]
        sent = over_bus(rows, near, self.kept.store.bus_share, self.division)
        experts = [*(expert for expert in chosen if expert in near), *sent]
        return experts, len(experts) < len(chosen)

    def _products(self, experts: Sequence[int], slots: Slots, x_TH: Tensor, weights_TK: Tensor) -> Tensor:
        """Compute some experts on the GPU, of which `slots` has the places: `(T, H), (T, K) -> (T, H)` in fp32."""
        stream = expert_stream(self.kept.packed, self.kept.form, x_TH.device, self.buffer)
        products = ChunkProducts(stream.form, NO_LORA, x_TH.dtype)
        rows_SH = x_TH.new_empty((slots.bounds[len(experts)], x_TH.shape[1]))
        for run, matrices in stream.gathered(experts, self.kept.gather):
            for part in slots.parts(run, stream.most_rows):
                rows, of_part = slots.of_experts(part), slice(part.start - run.start, part.stop - run.start)
                rows_SH[rows.first : rows.end] = products.forward(x_TH, rows, part, matrices.of(of_part))
        return slots.sums(rows_SH, range(len(experts)), weights_TK.dtype, weights_TK)

    def saved_bytes(self, gate_up_rank: int, down_rank: int) -> int:
        """Return 0: there is no backward."""
        return 0


class _Rest:
    """The CPU's part of a call, under way."""

    def __init__(self, of: Divided, x: Tensor, index: Tensor, weights: Tensor) -> None:
        self._memory, self._beside, self._device = CallMemory(x, index, weights), _SIDE, x.device
        memory = self._memory
        self._call = of.kept.packed.partial_call(memory.x, memory.index, memory.weights, memory.out)
        memory.put(x, index, weights)
        self._out = torch.empty_like(x)
        self._over = torch.cuda.Event(blocking=True) if x.is_cuda else None  # the cores belong to the kernel
        self._beside.start(x.device, self._compute)

    def _compute(self) -> None:
        launch_on(self._device)(self._call.function, self._call.address)
        self._memory.get(self._out)
        if self._over is not None:
            self._over.record(torch.cuda.current_stream(self._device))

    def added_to(self, computed: Tensor) -> Tensor:
        """Wait for the CPU, and return the sum of both parts. Raises the errors of the kernel."""
        self._beside.join(self._device)
        total = self._out + computed
        self.finish()
        self._call.rethrow()
        return total

    def finish(self) -> None:
        """Wait for the CPU, which reads and writes memory of this call."""
        if self._over is not None:
            self._over.synchronize()

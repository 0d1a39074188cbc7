"""Which backend computes a call of a layer's experts.

In: the layer's weights and settings, and the number of tokens. Out: an `ExpertsBackend`.
A new backend is one file beside these and one line in `choose`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ktc.model.experts import host_node
from ktc.model.experts.cpu_backend import Activations, CpuKernel
from ktc.model.experts.graph_backend import HostNode
from ktc.model.experts.grouped_products import described
from ktc.model.experts.lora import ExpertsLora
from ktc.model.experts.reference_backend import Reference
from ktc.model.experts.resident_backend import ResidentFew
from ktc.model.experts.stream_sizes import DEFAULT_BUFFER
from ktc.model.experts.streamed_backend import Streamed
from ktc.model.experts.trained_backend import Trained
from ktc.model.experts.weights import ExpertsWeights
from ktc.model.kernels.form import ExpertsSizes


class ExpertsBackend(Protocol):
    """One way to compute one layer's experts."""

    @property
    def device(self) -> torch.device:
        """The device that multiplies."""
        ...

    def run(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, lora: ExpertsLora) -> Tensor:
        """Compute the layer's output, on the device and in the dtype of hidden states.

        `(T, H), (T, K) int64, (T, K) -> (T, H)`, each on any device; differentiable in hidden states, routing weights
        and factors. Raises `IndexError` for an expert that does not exist.
        """
        ...

    def prepare(self) -> None:
        """Take the memory that the layer needs in every call, so that what is free afterwards can be measured."""
        ...

    def saved_bytes(self, gate_up_rank: int, down_rank: int) -> int:
        """Count the bytes per token that forward keeps on the host for backward, beside its caller's hidden states."""
        ...


@dataclass(frozen=True, slots=True)
class Offload:
    """Calls of at least `min_tokens` tokens run on `devices`, to which the packed weights are streamed.

    `buffer` is the size in bytes of the ring on each of them. Weights that are `resident` are sent once and stay.
    """

    devices: tuple[torch.device, ...]
    min_tokens: int
    buffer: int = DEFAULT_BUFFER
    resident: bool = False

    def has_room_for_copies(self, tokens: int, sizes: ExpertsSizes) -> bool:
        """Return whether the experts of so few tokens, which are there already, are no more than a layer's."""
        return self.resident and len(self.devices) == 1 and tokens * sizes.top_k <= sizes.num_experts

    def __str__(self) -> str:
        devices = ", ".join(map(str, self.devices))
        stay = "weights stay there" if self.resident else f"weights sent through {self.buffer / 2**20:,.0f} MiB"
        return f"from {self.min_tokens:,} tokens on {devices}: {stay}, {described(self.devices[0])}"


def choose(
    weights: ExpertsWeights, tokens: int, *, activations: Activations, offload: Offload | None, plain: bool = False
) -> ExpertsBackend:
    """Return the backend of a call with this number of tokens; a `plain` one has neither gradients nor LoRA."""
    packed, form = weights.packed, weights.form
    if packed is None:
        return Reference(weights)
    if weights.training.repacks:
        return Trained(weights, activations)
    if plain and offload is not None and offload.has_room_for_copies(tokens, packed.sizes):
        return ResidentFew(packed, form, offload.devices[0])
    if offload is not None and tokens >= offload.min_tokens:
        return Streamed(packed, form, offload.devices, offload.buffer, offload.resident)
    if not torch.compiler.is_compiling() and (nodes := host_node.current()) is not None:
        return HostNode(packed, form, nodes)
    return CpuKernel(packed, form, weights.dtype, activations)

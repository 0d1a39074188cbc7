"""Which backend computes a call of a layer's experts.

In: the layer's weights and settings, and the number of tokens. Out: an `ExpertsBackend`.
A new backend is one file beside these and one line in `choose`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from ktc.model.experts.backends.cpu_backend import Activations, CpuKernel
from ktc.model.experts.backends.divided_backend import Divided
from ktc.model.experts.backends.graph_backend import HostNode
from ktc.model.experts.backends.kept_backend import SplitNode
from ktc.model.experts.backends.reference_backend import Reference
from ktc.model.experts.backends.resident_backend import GpuResident
from ktc.model.experts.backends.streamed_backend import Streamed
from ktc.model.experts.backends.trained_backend import Trained
from ktc.model.experts.kept.kept_division import Division
from ktc.model.experts.kept.kept_experts import KeptLayer
from ktc.model.experts.layouts.coded_matrices import are_coded
from ktc.model.experts.layouts.packed import PackedExperts
from ktc.model.experts.layouts.panel_codes import MOST_ROWS
from ktc.model.experts.products.grouped_products import described, multiplies_codes
from ktc.model.experts.streamed.shared_experts import Sharing
from ktc.model.experts.streamed.stream_sizes import DEFAULT_BUFFER
from ktc.model.experts.trained.lora import ExpertsLora
from ktc.model.experts.weights import ExpertsWeights
from ktc.model.kernels.step_context import StepContext

_ROWS: Final = 128 << 20  # bytes of the rows of a call on resident experts, each for gate and up, and for down


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
class Kept:
    """Single experts that a device keeps: `places` for each layer on average, which all layers share.

    Of the others, the GPU reads the part `share` over the bus at first. With `fixed` neither changes. By `division`,
    calls of more rows than a step has are divided too.
    """

    places: int
    share: float
    fixed: bool = False
    division: Division | None = None


@dataclass(frozen=True, slots=True)
class Offload:
    """Calls of at least `min_tokens` tokens run on `devices`, to which the packed weights are streamed.

    `buffer` is the size in bytes of the ring on each of them. Weights that are `resident` are sent once and stay; of
    others, the device has places for as many single experts as `kept` says, for decoding. While processes are `sharing`
    them, calls of any size run on the devices.
    """

    devices: tuple[torch.device, ...]
    min_tokens: int
    buffer: int = DEFAULT_BUFFER
    resident: bool = False
    kept: Kept | None = None
    sharing: Sharing | None = None

    def takes(self, tokens: int) -> bool:
        """Return whether a call of `tokens` runs on the devices. All processes that share experts agree."""
        return tokens >= self.min_tokens or (self.sharing is not None and self.sharing.on)

    def serves_at_once(self, tokens: int, packed: PackedExperts) -> bool:
        """Return whether the experts that are there already multiply so few tokens without being cut into chunks.

        Their rows have to be small. With codes that are multiplied as they are, experts have `MOST_ROWS` on average; in
        other formats, there are no more copies of chosen experts than a layer has.
        """
        device, *others = self.devices
        if not self.resident or others:
            return False
        count, hidden, intermediate, top_k = packed.sizes
        room = tokens * top_k * (hidden + intermediate) * packed.dtype.itemsize <= _ROWS
        if not packed.is_plain:
            coded = are_coded(*packed.panels) and multiplies_codes(device)
            room = room and tokens * top_k <= count * (MOST_ROWS if coded else 1)
        return room

    def divides(self, tokens: int) -> Division | None:
        """Return how a call of this many tokens, which is not sent whole, is divided; None where it is not."""
        division = None if self.kept is None else self.kept.division
        return division if division is not None and tokens >= division.least else None

    def __str__(self) -> str:
        devices = ", ".join(map(str, self.devices))
        stay = "weights stay there" if self.resident else f"weights sent through {self.buffer / 2**20:,.0f} MiB"
        shared = f", shared by {self.sharing.size} processes" if self.sharing is not None else ""
        return f"from {self.min_tokens:,} tokens on {devices}: {stay}{shared}, {described(self.devices[0])}"


def choose(
    weights: ExpertsWeights, tokens: int, context: StepContext, *, activations: Activations, offload: Offload | None,
    plain: bool = False, kept: KeptLayer | None = None,
) -> ExpertsBackend:  # fmt: skip
    """Return the backend of a call with this number of tokens; a `plain` one has neither gradients nor LoRA.

    `context` is that of the module's model, and `kept` the experts of the layer that a GPU keeps.
    """
    packed, form = weights.packed, weights.form
    if packed is None:
        return Reference(weights)
    if weights.training.repacks:
        return Trained(weights, activations, context)
    if plain and offload is not None and offload.serves_at_once(tokens, packed):
        return GpuResident(packed, form, offload.devices[0])
    if offload is not None and offload.takes(tokens):
        return Streamed(packed, form, offload.devices, offload.buffer, offload.resident, kept, offload.sharing)
    if torch.compiler.is_compiling():
        return CpuKernel(packed, form, weights.dtype, activations)
    if context.host_nodes is not None:
        host = HostNode(packed, form, context.host_nodes)
        return SplitNode(host, kept) if kept is not None and plain else host
    host = CpuKernel(packed, form, weights.dtype, activations, context)
    division = offload.divides(tokens) if plain and kept is not None and offload is not None else None
    if division is None or kept is None or offload is None:
        return host
    return Divided(host, kept, division, offload.buffer)

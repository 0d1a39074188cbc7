"""The floor of a decoding step on a GPU: what its bytes and its launches take by the rates of the same minute.

In: a loaded model, what its steps read, and its GPU. Out: milliseconds by part. The GPU reads the weights of the step
and the cache once; bus and CPU read the experts that it does not keep, at once and with nothing left over; each kernel
and each host function takes its place in the graph. Nothing of this overlaps but bus and CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ktc.model.experts.backends.cpu_backend import CpuKernel
from ktc.model.experts.backends.streamed_backend import Streamed
from ktc.model.experts.module import FusedMoe
from ktc.model.kernels.triton_support import lacking
from ktc.model.linears.stored_linear import StoredLinear
from ktc.tools.measure import gpu, links
from ktc.tools.measure.bus import Bus
from ktc.tools.measure.limits import Limits

COUNTED: Final = 4  # steps whose kernels are counted
_COPIED: Final = 256 << 20  # bytes of one copy over the bus
_STACKED: Final = 3  # dimensions of the weights of experts in one tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """The bytes that a step reads by engine, its kernels and its host functions."""

    gpu: float
    bus: float
    cpu: float
    kernels: float
    host_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MinuteRates:
    """Bytes/s of the GPU's memory, and of bus and CPU at once; seconds of a kernel and of a host function in a graph.

    `cpu_alone` is bytes/s of the CPU's reads while the bus is idle.
    """

    gpu: float
    bus: float
    cpu: float
    cpu_alone: float
    kernel: float
    host_node: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The floor of a step in milliseconds, its parts, and what they were computed from."""

    ms: float
    gpu_ms: float
    experts_ms: float
    launches_ms: float
    read: Read
    rates: MinuteRates


def rates_of(device: torch.device, limits: Limits, cpu_alone: float) -> MinuteRates:
    """Measure a GPU, its bus beside the CPU, and the nodes of a graph, about two seconds.

    A host function is 0 where a thread answers the GPU's requests: its two kernels are among those of a step.
    """
    bus, cpu = links.beside(Bus(_COPIED, device), limits)
    node, host_node = gpu.graph_node(device).median, gpu.host_node(device).median if lacking(device) else 0.0
    return MinuteRates(
        gpu=gpu.bandwidth(device, _COPIED).median, bus=bus.median, cpu=cpu.median, cpu_alone=cpu_alone, kernel=node,
        host_node=host_node,
    )  # fmt: skip


def floor_of(read: Read, rates: MinuteRates) -> Floor:
    """Return the floor. Where a step reads nothing over the bus, the CPU reads alone."""
    gpu_ms = 1e3 * read.gpu / rates.gpu
    both = rates.bus + rates.cpu if read.bus else rates.cpu_alone
    experts_ms = 1e3 * (read.bus + read.cpu) / both
    launches_ms = 1e3 * (max(0.0, read.kernels) * rates.kernel + read.host_nodes * rates.host_node)
    ms = gpu_ms + experts_ms + launches_ms
    return Floor(ms=ms, gpu_ms=gpu_ms, experts_ms=experts_ms, launches_ms=launches_ms, read=read, rates=rates)


def reason_against(model: nn.Module, tokens: int) -> str:
    """Return why a step of a model has no floor here, "" if it has one."""
    fused = [module for module in model.modules() if isinstance(module, FusedMoe)]
    if any(isinstance(module.backend(tokens, plain=True), Streamed) for module in fused):
        return f"{tokens} tokens are sent all experts of a layer"
    packed = {id(parameter) for module in fused for parameter in module.parameters()}
    for path, parameter in cast("Iterator[tuple[str, torch.Tensor]]", model.named_parameters()):
        if id(parameter) not in packed and parameter.ndim == _STACKED and min(parameter.shape) > 1:
            return f"PyTorch computes with `{path}`, whose reads are not counted"
    return ""


def weights_read(model: nn.Module, tokens: int) -> tuple[float, int]:
    """Return the bytes of weights that a step reads on GPUs, without experts that steps split, and its host functions.

    A table of embeddings is not read as a whole, unless it is the head too.
    """
    total, nodes = 0.0, 0
    of_experts, seen = set[int](), set[int]()
    for module in model.modules():
        if isinstance(module, FusedMoe):
            of_experts |= {id(parameter) for parameter in module.parameters()}
            if isinstance(module.backend(tokens, plain=True), CpuKernel) or module.kept is not None:
                nodes += 1
            else:
                total += module.packed_bytes * (1 - (1 - module.top_k / module.num_experts) ** tokens)
    for tensor in _weights(model):
        if tensor.device.type == "cuda" and id(tensor) not in of_experts | seen:
            seen.add(id(tensor))
            total += tensor.nbytes
    return total, nodes


def _weights(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        if not isinstance(module, nn.Embedding):
            yield from cast("Iterator[torch.Tensor]", module.parameters(recurse=False))
        if isinstance(module, StoredLinear) and module.packed is not None:
            yield module.packed


def cache_bytes(cache: Any) -> int:
    """Return the bytes of keys and values in a cache, 0 for caches of another kind."""
    layers = getattr(cache, "layers", ())
    parts = (getattr(layer, name, None) for layer in layers for name in ("keys", "values"))
    return sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))


class Kernels:
    """Counts the kernels of `COUNTED` steps of one `generate`, after `first` tokens and the one that follows.

    `of_step` is 0 where the steps were not counted: a graph captured among them runs a step eagerly.
    """

    def __init__(self, first: int) -> None:
        self._first, self._tokens = first, 0
        self._profile: Any = None
        self.of_step = 0.0

    def token(self) -> None:
        """Take note of a token that the host has."""
        self._tokens += 1
        if self._tokens == self._first:
            torch.cuda.synchronize()  # the next step may be under way: it is not one of those
            self._profile = profile(activities=[ProfilerActivity.CUDA])
            self._profile.start()
        elif self._tokens == self._first + COUNTED + 1 and self._profile is not None:
            torch.cuda.synchronize()
            self._profile.stop()
            events = self._profile.events()
            on_gpu = [event for event in events if event.device_type.name == "CUDA"]
            self.of_step, self._profile = len(on_gpu) / COUNTED, None

    def close(self) -> None:
        """End the count of a `generate` that failed."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

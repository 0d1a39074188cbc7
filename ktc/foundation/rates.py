"""The rates of a machine: products, reads of memory, buses between devices, and the times of fixed costs.

Rates come from a measurement, a host file, or what is usual of such a processor and card. The planner predicts times
with them. All values are in SI units: FLOP/s, bytes per second, seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Origin = Literal["measured", "described", "assumed"]

# Of the CPU's bandwidth, the part that few rows times codes reach: 0.5 to 0.6 on a Xeon with AMX (docs/benchmarks.md).
CODES_READ: Final = 0.55


@dataclass(frozen=True, slots=True)
class Figure:
    """A rate or a time: the median of its measurements, and their interquartile range as a share of it."""

    median: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class CpuRates:
    """The processor. `products` has FLOP/s of many rows by weight format and number of threads, largest last.

    `bandwidth` has bytes/s of sequential reads by number of threads, `node_bandwidth` that of one NUMA node's threads
    from its own memory. `attention` has FLOP/s of PyTorch's attention on all threads, `latent_attention` those where
    values are narrower than keys, as in MLA. `operator` is the time of one PyTorch operator on few numbers, `call` that
    of one native call.
    """

    products: Mapping[str, Mapping[int, Figure]]
    bandwidth: Mapping[int, Figure]
    node_bandwidth: Figure
    attention: Figure
    latent_attention: Figure
    operator: Figure
    call: Figure


@dataclass(frozen=True, slots=True)
class GpuRates:
    """One GPU. `products` has FLOP/s of large products by dtype (`bf16`, `fp32`), `grouped` those of experts' grouped
    products in bf16, `attention` and `latent_attention` those of attention. `bandwidth` is bytes/s of its memory.

    `bus` is bytes/s from pinned host memory, `bus_beside_cpu` and `cpu_beside_bus` those of the bus and of the
    CPU's reads when both work at once. `operator` is the time of one operator of a module's forward with gradients,
    which Python issues, `launch` that of one small kernel alone, `graph_node` that of one in a CUDA graph, and
    `host_node` that of a host function in one. `context` is bytes that CUDA itself takes.
    """

    products: Mapping[str, Figure]
    grouped: Figure
    attention: Figure
    latent_attention: Figure
    bandwidth: Figure
    bus: Figure
    bus_beside_cpu: Figure
    cpu_beside_bus: Figure
    operator: Figure
    launch: Figure
    graph_node: Figure
    host_node: Figure
    context: int


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of a machine. `gpus` is in the order of its GPUs.

    `buses` is bytes/s of all buses at once, `peer` that between two GPUs, None for fewer than two; `disk` bytes/s of
    reads. `when` is the date of a measurement, `busy` whether other programs used the machine meanwhile.
    """

    cpu: CpuRates
    gpus: tuple[GpuRates, ...]
    disk: Figure
    buses: Figure | None = None
    peer: Figure | None = None
    origin: Origin = "assumed"
    when: str = ""
    busy: bool = False

"""The whole measurement of a machine: kernels are built first, then each figure is measured by itself.

In: a host, and a function that receives the progress. Out: its rates and warnings: H208 a busy machine, H209 figures
that could not be measured and are the usual ones. Refused: all refusals of the build of kernels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Final, TypeVar

import torch

from ktc.diagnostics import Diagnostic, listing
from ktc.foundation import environment, versions
from ktc.foundation.files import temporary_folder
from ktc.foundation.host import Host, numa_nodes
from ktc.foundation.host_file import Measurement
from ktc.foundation.rates import CpuRates, Figure, GpuRates, Rates
from ktc.model.kernels.kernel_library import KernelLibrary
from ktc.stages.codegen import build, render
from ktc.tools.measure import attention, cpu, disk, gpu, links, load
from ktc.tools.measure.bus import Bus
from ktc.tools.measure.limits import Limits, build_library

T = TypeVar("T")
Progress = Callable[[str, int, int], None]  # of a part: its name, the finished parts and all parts
_COPIED: Final = 512 << 20  # bytes of a copy over the bus
_OF_CPU: Final = 6  # parts beside those by format and by threads; the disk is one of them
_OF_GPU: Final = 14
_OF_GPUS: Final = 1
_OF_SEVERAL: Final = 2
_FAILURES: Final = (RuntimeError, OSError, MemoryError, AttributeError)  # of drivers and libraries; CUDA's among them


@dataclass(frozen=True, slots=True)
class Measured:
    """The machine with its measured rates, and the seconds of building kernels and of measuring."""

    host: Host
    measurement: Measurement
    build_seconds: float
    seconds: float
    warnings: tuple[Diagnostic, ...]


@dataclass(slots=True)
class Steps:
    """The parts of a measurement: reports each to `progress`, and collects those that fail."""

    progress: Progress
    total: int
    done: int = 0
    failures: dict[str, str] = field(default_factory=dict[str, str])

    def part(self, name: str, measure: Callable[[], T], otherwise: T) -> T:
        """Return what `measure` returns; `otherwise`, and a failure on the list, where it fails."""
        self.progress(name, self.done, self.total)
        try:
            return measure()
        except _FAILURES as error:
            self.failures[name] = next(iter(str(error).splitlines()), type(error).__name__)
            return otherwise
        finally:
            self.done += 1


def measure(host: Host, progress: Progress) -> Measured:
    """Measure the machine, about half a minute beside the build of kernels."""
    began = time.perf_counter()
    progress("building kernels", 0, 0)
    specs = cpu.kernels(host.isas[0])
    library = build.build(render.render(specs, dict.fromkeys(specs, "ktc doctor --measure")), host)
    with temporary_folder("measure") as folder:
        loops = build_library(host.isas[0], folder)
        built = time.perf_counter()
        progress("other programs", 0, 0)
        used = load.load()
        counts = cpu.thread_counts(host)
        num_products = len(cpu.formats(host.isas[0])) + 1
        of_gpus = _OF_GPU * len(host.gpus) + _OF_GPUS * bool(host.gpus) + _OF_SEVERAL * (len(host.gpus) > 1)
        steps = Steps(progress, _OF_CPU + num_products + len(counts) + of_gpus)
        usual = replace(host, described=None).rates
        limits = {threads: Limits(loops, threads) for threads in counts[-1:]}
        limits |= {threads: Limits(loops, threads, like=limits[counts[-1]], wall=True) for threads in counts[:-1]}
        of_cpu = _cpu(host, library, limits, usual.cpu, steps)
        rates = replace(usual, cpu=of_cpu, origin="measured", when=date.today().isoformat())
        devices = [torch.device("cuda", number) for number in range(len(host.gpus))]
        rates = _gpus(rates, devices, limits[counts[-2 if len(counts) > 1 else -1]], steps)
    folder = environment.cache_dir()
    rates = replace(rates, disk=steps.part("disk", lambda: disk.disk(folder), usual.disk))
    warnings = (*_busy(used, rates), *_failed(steps.failures))
    rates = replace(rates, busy=any(warning.code == "H208" for warning in warnings))
    measurement = Measurement(rates.when, rates.busy, versions.__version__)
    return Measured(
        replace(host, described=rates, notes=()), measurement, built - began, time.perf_counter() - built, warnings
    )


def _cpu(host: Host, library: KernelLibrary, limits: Mapping[int, Limits], usual: CpuRates, steps: Steps) -> CpuRates:
    """Measure the processor."""
    counts, names = tuple(sorted(limits)), cpu.formats(host.isas[0])
    *specs, small = cpu.kernels(host.isas[0])
    bandwidth = {
        n: steps.part(f"memory, {n} threads", lambda these=limits[n]: cpu.reads(these), usual.bandwidth[n])
        for n in counts
    }
    node = steps.part("memory of one NUMA node", lambda: _node(limits), bandwidth[counts[-1]])
    products = dict[str, Mapping[int, Figure]]()
    for name, spec in zip(names, specs, strict=True):
        experts = cpu.Experts(library, spec)
        products[name] = steps.part(
            f"products of {name}", lambda kind=experts: cpu.by_threads(counts, kind.products), usual.products[name]
        )
    products["fp32"] = steps.part(
        "products of fp32", lambda: cpu.by_threads(counts, cpu.fp32_products), usual.products["fp32"]
    )
    here = torch.device("cpu")
    even = steps.part("attention", lambda: attention.attention(here, attention.EVEN), usual.attention)
    latent = steps.part("latent attention", lambda: attention.attention(here, attention.LATENT), usual.latent_attention)
    operator = steps.part("an operator", cpu.operator, usual.operator)
    call = steps.part("a native call", lambda: cpu.Experts(library, small, cpu.SMALL).call(), usual.call)
    return CpuRates(products, bandwidth, node, even, latent, operator, call)


def _node(limits: Mapping[int, Limits]) -> Figure:
    """Measure reads of one NUMA node's threads from its own memory."""
    nodes = numa_nodes()
    everything = limits[max(limits)]
    if len(nodes) < 2:
        return cpu.reads(everything)
    threads = max(1, max(limits) // len(nodes))
    return cpu.reads(Limits(everything.library, threads, cpus=nodes[0].cpus))


def _gpus(rates: Rates, devices: Sequence[torch.device], limits: Limits, steps: Steps) -> Rates:
    """Measure the GPUs, their buses and the links between them. `limits` are of the threads beside a bus."""
    if not devices:
        return rates
    buses = [steps.part(f"pinned memory for {device}", lambda to=device: Bus(_COPIED, to), None) for device in devices]
    contexts = steps.part(
        "memory of CUDA", lambda: gpu.contexts(len(devices)), tuple(usual.context for usual in rates.gpus)
    )
    gpus = [
        replace(_gpu(device, bus, limits, usual, steps), context=context)
        for device, bus, usual, context in zip(devices, buses, rates.gpus, contexts, strict=True)
    ]
    rates = replace(rates, gpus=tuple(gpus))
    if len(devices) < 2:
        return rates
    all_buses = [bus for bus in buses if bus is not None]
    return replace(
        rates,
        buses=steps.part("all buses", lambda: links.together(all_buses), rates.buses),
        peer=steps.part("between GPUs", lambda: links.peer(devices[0], devices[1]), rates.peer),
    )


def _gpu(device: torch.device, bus: Bus | None, limits: Limits, usual: GpuRates, steps: Steps) -> GpuRates:
    """Measure one GPU, and its bus where memory could be pinned for it."""

    def part(name: str, measure: Callable[[], Figure], otherwise: Figure) -> Figure:
        return steps.part(f"{name} of {device}", measure, otherwise)

    def operator() -> Figure:
        return part("an operator", lambda: gpu.operator(device), usual.operator)

    before = operator()
    products = {
        dtype: part(f"{dtype} products", lambda name=dtype: gpu.products(device, name), figure)
        for dtype, figure in usual.products.items()
    }
    rates = replace(
        usual,
        products=products,
        grouped=part("grouped products", lambda: attention.grouped(device), usual.grouped),
        attention=part("attention", lambda: attention.attention(device, attention.EVEN, batch=16), usual.attention),
        latent_attention=part(
            "latent attention", lambda: attention.attention(device, attention.LATENT, batch=16), usual.latent_attention
        ),
        bandwidth=part("memory", lambda: gpu.bandwidth(device), usual.bandwidth),
        launch=part("a launch", lambda: gpu.launch(device), usual.launch),
        graph_node=part("a graph's node", lambda: gpu.graph_node(device), usual.graph_node),
        host_node=part("a host node", lambda: gpu.host_node(device), usual.host_node),
        # Of two moments the faster one: hosts of virtual machines are slower for seconds, and a run lasts longer.
        operator=min(before, operator(), key=lambda figure: figure.median),
    )
    if bus is None:
        return rates
    at_once = usual.bus_beside_cpu, usual.cpu_beside_bus
    of_bus, of_cpu = steps.part(f"bus of {device} and CPU at once", lambda: links.beside(bus, limits), at_once)
    return replace(
        rates, bus=part("bus", lambda: links.alone(bus), usual.bus), bus_beside_cpu=of_bus, cpu_beside_bus=of_cpu
    )


def _busy(used: float, rates: Rates) -> Iterator[Diagnostic]:
    """Yield a warning (H208) where other programs used the processor, or figures differ from round to round."""
    figures = [*rates.cpu.bandwidth.values(), *(one for by in rates.cpu.products.values() for one in by.values())]
    spread = statistics.median(figure.spread for figure in figures)
    if used <= load.MOST_LOAD and spread <= load.MOST_SPREAD:
        return
    evidence = f"other programs used {used:.0%} of the processor before, and figures spread by {spread:.0%}"
    hint = "measure again when other programs have ended: plans expect a slower machine until then"
    yield Diagnostic("H208", f"this machine is busy: {evidence}", hint=hint, severity="warning")


def _failed(failures: Mapping[str, str]) -> Iterator[Diagnostic]:
    """Yield a warning (H209) for the figures that are the usual ones."""
    if failures:
        reasons = listing(f"{name} ({reason})" for name, reason in failures.items())
        message = f"not measured, and assumed as is usual of such a machine: {reasons}"
        yield Diagnostic("H209", message, hint="`ktc doctor` shows what this machine lacks", severity="warning")

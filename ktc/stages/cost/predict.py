"""Work, a use and rates -> `Prediction`: how long one call takes, and which engine it waits for.

Each product takes the longer of its FLOPs and its bytes (the roofline model, Williams et al., 2009). On the CPU, one
module follows another. A GPU works while Python issues the next operators and the bus sends the next layers' experts.
It waits for experts on the CPU, whose hidden states cross the bus both ways.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ktc.foundation.formats import FORMATS, Blocks, Codes
from ktc.foundation.rates import CODES_READ, Figure, GpuRates, Rates
from ktc.model.experts.kept.kept_division import CALL, lead_of
from ktc.stages.cost.amounts import Amounts
from ktc.stages.cost.traffic import states, traffic_of
from ktc.stages.cost.types import Prediction, Use, Work
from ktc.stages.plan.divided import OVERHEAD

_OPTIMIZER_BYTES: Final = 28  # of AdamW per fp32 parameter: gradient, two moments, the parameter, read and written
_OPTIMIZER_OPERATORS: Final = 14  # per tensor on the CPU, with the norm that clips
_OPTIMIZER_LAUNCHES: Final = 0.5  # per tensor on a GPU, where one kernel updates many
_UPDATE: Final = 45  # operators of a small module: Python's part in clipping and the update, on a GPU

# Fitted to runs on H100 and H200, of three models and 8 to 48 layers (docs/benchmarks.md, "Plans"), in operators of a
# small module.
_ISSUED: Final = 2.6  # an operator of a model, with wrappers, hooks and views that are not counted
_CALL: Final = 110 * _ISSUED  # outside the layers: embedding, positions, mask, the preparation of `generate`
_STEP: Final = 2  # the choice of a token between two steps of a CUDA graph, beside which Python works
_NODES: Final = 4.2  # a kernel of a model in a CUDA graph, in nodes that wait for nothing
_ANSWERED: Final = 3e-6  # seconds in which a thread sees a GPU's request and the GPU its answer, without the call
_MICRO_BATCH: Final = 70  # a trainer's own work on a sequence: a stacked step runs head and loss once for many
# What of the others' time remains, where a GPU, buses and Python work side by side: one thread issues both kernels and
# copies, and the ring of sent weights holds about a layer.
_BESIDE: Final = 0.2
_CODES: Final = 0.2  # of the products of bf16, the rate at which a GPU multiplies codes, where it does not decode them
_EXCHANGED: Final = 7  # rows of each other process: states and gradients, and sums in fp32, twice as large
_SPLIT_NODES: Final = 6  # kernels of experts on three engines: the split, two products, activation, two sums


@dataclass(frozen=True, slots=True)
class Issue:
    """Whether decoding steps are CUDA graphs, or native programs on the CPU; otherwise PyTorch issues operators.

    A training step of a model without kernels for its experts has a call per sequence; with them, one for all, in which
    layers on a GPU are `compiled`. A `whole` model does more than its layers: a part of one is predicted without that.
    Experts that are sent are shared by `processes` with a GPU each, of which one is predicted.
    """

    cuda_graph: bool = False
    native_step: bool = False
    calls: int = 1
    compiled: bool = False
    whole: bool = False
    processes: int = 1


AS_PYTORCH: Final = Issue()


def predict(works: Sequence[Work], use: Use, rates: Rates, threads: int, issue: Issue = AS_PYTORCH) -> Prediction:
    """Return the prediction of one call on a machine with these rates, whose CPU kernels have `threads` threads."""
    amounts = Amounts(use, issue.calls, issue.compiled) if use.trains else Amounts(use)
    gpu = next((work.device for work in works if work.kind == "attention" and work.device != "cpu"), "")
    # One core is the driver's while a GPU works.
    threads = max(1, threads - 1) if gpu else threads
    clock = _Clock(amounts, rates, threads, issue if use.phase == "decode" else AS_PYTORCH, issue.processes)
    engines, kinds, at_once = (defaultdict[str, float](float) for _ in range(3))
    crossings = waited = in_turn = 0.0
    for work in works:
        if busy := clock.split(work):
            kinds[work.kind] += max(busy.values())
            crossed = clock.crossing(gpu, work) if gpu else 0.0
            crossings, waited = crossings + crossed, waited + crossed + max(busy.values())
            for engine, seconds in busy.items():
                at_once[engine] += seconds
            continue
        busy = clock.seconds(work)
        for engine, seconds in busy.items():
            engines[engine] += seconds
        kinds[work.kind] += max(busy.values())
        in_turn += max((seconds for engine, seconds in busy.items() if engine.startswith("cuda")), default=0.0)
        if gpu and work.experts is not None and "cpu" in busy:
            crossed = clock.crossing(gpu, work)
            crossings, waited = crossings + crossed, waited + crossed + busy["cpu"]
        waited += clock.shared(work)
    if gpu and issue.whole and not clock.issue.cuda_graph:
        engines["host"] += amounts.calls * _CALL * clock.operator(gpu)
    if use.trains:
        kinds["optimizer"] = clock.optimizer(works)
        engines["host" if gpu else "cpu"] += kinds["optimizer"]
        waited += _MICRO_BATCH * use.batch * clock.operator(gpu) * issue.whole
    between = _STEP * clock.operator(gpu) * issue.whole if clock.issue.cuda_graph else 0.0
    seconds = _total(engines, in_turn, waited) + between
    for engine, of_split in at_once.items():
        engines[engine] += of_split
    binds = max(engines, key=lambda name: engines[name])
    return Prediction(use, seconds, kinds, engines, crossings, binds, traffic_of(works, amounts))


def _total(engines: Mapping[str, float], in_turn: float, waited: float) -> float:
    """Return the seconds of a call: of what runs side by side, then what a GPU waits for.

    GPUs that have layers in turn do not work side by side: `in_turn` is the sum over all works.
    """
    kinds = {"cuda": in_turn}
    for engine, seconds in engines.items():
        kind = engine.partition(":")[0]
        kinds[kind] = max(kinds.get(kind, 0.0), seconds)
    on_cpu = kinds.pop("cpu", 0.0)
    longest = max(kinds.values(), default=0.0)
    return longest + _BESIDE * (sum(kinds.values()) - longest) + max(waited, on_cpu)


@dataclass(frozen=True, slots=True)
class _Clock:
    """The seconds of works in one use."""

    amounts: Amounts
    rates: Rates
    threads: int
    issue: Issue
    processes: int = 1

    def seconds(self, work: Work) -> dict[str, float]:
        """Return the busy seconds of each engine."""
        if work.experts is not None:
            return self._experts(work)
        if work.device == "cpu":
            return {"cpu": self._on_cpu(work)}
        busy = self._on_gpu(work, work.device)
        if work.streamed:
            busy[f"bus:{work.device}"] = self.amounts.passes * work.streamed / self._gpu(work.device).bus.median
        return busy

    def operator(self, gpu: str) -> float:
        """Return the seconds in which Python issues an operator of a small module to a GPU, 0 for no GPU."""
        return self._gpu(gpu).operator.median if gpu else 0.0

    # On the CPU ------------------------------------------------------------------------------------------------------
    def _on_cpu(self, work: Work) -> float:
        amounts, cpu = self.amounts, self.rates.cpu
        # Threads of all nodes read scattered weights over the link between the nodes.
        bandwidth = cpu.node_bandwidth.median if work.scattered else at(cpu.bandwidth, self.threads)
        rate = at(cpu.products.get(work.weight_format) or cpu.products["bf16"], self.threads)
        read = bandwidth * (CODES_READ if _is_coded(work) else 1.0)
        products = max(amounts.flops(work) / rate, amounts.passes * amounts.read(work) / read)
        one = cpu.call if self.issue.native_step else cpu.operator
        issued = amounts.operators(work) * one.median
        attention = cpu.latent_attention if work.core.latent else cpu.attention
        return products + amounts.scored(work) / attention.median + amounts.moved(work) / bandwidth + issued

    # On a GPU --------------------------------------------------------------------------------------------------------
    def _on_gpu(self, work: Work, device: str) -> dict[str, float]:
        amounts, gpu = self.amounts, self._gpu(device)
        rate, bandwidth = _products_of(gpu, work), gpu.bandwidth.median
        rate *= _CODES if amounts.multiplies_codes(work) and not amounts.use.trains else 1.0
        products = max(amounts.flops(work) / rate, amounts.passes * amounts.read(work) / bandwidth)
        attention = gpu.latent_attention if work.core.latent else gpu.attention
        busy = products + amounts.scored(work) / attention.median
        busy += (
            amounts.moved(work, fused=self.issue.cuda_graph) + amounts.rows(work) + amounts.copied(work)
        ) / bandwidth
        if work.packed:
            busy += amounts.unpacking(work) / bandwidth
        if self.issue.cuda_graph:
            return {device: busy + amounts.nodes(work) * _NODES * gpu.graph_node.median}
        return {device: busy, "host": amounts.issued(work) * _ISSUED * gpu.operator.median}

    def _gpu(self, device: str) -> GpuRates:
        return self.rates.gpus[int(device.partition(":")[2] or 0)]

    def crossing(self, device: str, work: Work) -> float:
        """Return the seconds of hidden states to the CPU and back in every pass, with the host's part in it.

        Where a call is divided, no engine works beside some of Python's.
        """
        gpu, use = self._gpu(device), self.amounts.use
        both = 2 * gpu.launch.median
        if self.issue.cuda_graph:  # two kernels, between which a thread of the host sees the request and answers
            both = 2 * _NODES * gpu.graph_node.median + _ANSWERED
        alone = OVERHEAD * gpu.operator.median if work.experts and work.experts.is_divided(use) else 0.0
        return (1 + use.trains) * (use.tokens * work.moved / gpu.bus.median + both) + alone

    # Routed experts --------------------------------------------------------------------------------------------------
    def _experts(self, work: Work) -> dict[str, float]:
        assert work.experts is not None, "the caller asks for experts"
        devices = work.experts.sent_to(self.amounts.use.tokens)
        if devices in ((), ("cpu",)):
            return {"cpu": self._on_cpu(work)}
        busy: dict[str, float] = {}
        for device in devices:
            for engine, seconds in self._on_gpu(work, device).items():
                busy[engine] = seconds if engine == "host" else seconds / len(devices)
            if not work.experts.resident:
                buses = len(devices) * self.processes
                sent = self.amounts.passes * work.weights * (1 - work.experts.kept) / buses
                busy[f"bus:{device}"] = sent / self._bus(buses, device)
        return busy

    def split(self, work: Work) -> dict[str, float]:
        """Return the busy seconds of the engines that read the experts of a step at once; none where one does."""
        experts = work.experts
        if experts is None or experts.bus_share is None:
            return {}
        bus = self._gpu(experts.devices[0]).bus_beside_cpu.median
        lead = 0.0 if experts.fixed else lead_of(experts.bus_share, bus, work.weights / experts.count)
        read = experts.engines(self.amounts.use, lead)
        if read is None:
            return {}
        kept, sent, rest = (number * work.weights / experts.count for number in read)
        device = experts.devices[0]
        gpu, codes = self._gpu(device), CODES_READ if _is_coded(work) else 1.0
        use = self.amounts.use
        call = CALL if rest else 0.0
        if experts.is_divided(use):
            rest, call = rest * experts.crowding(use.tokens), 0.0
        return {
            "cpu": rest / (codes * gpu.cpu_beside_bus.median) + call,
            f"bus:{device}": sent / bus,
            **self._beside(work, device, kept, sent),
        }

    def _beside(self, work: Work, device: str, kept: float, sent: float) -> dict[str, float]:
        """Return the seconds in which a GPU multiplies kept and sent bytes of experts, and those of Python."""
        assert work.experts is not None, "the caller splits experts"
        gpu, use = self._gpu(device), self.amounts.use
        if not work.experts.is_divided(use):
            return {device: kept / gpu.bandwidth.median + _SPLIT_NODES * _NODES * gpu.graph_node.median}
        part = (kept + sent) / (work.weights * work.experts.touched(use.tokens))
        return {engine: seconds * part for engine, seconds in self._on_gpu(work, device).items()}

    def shared(self, work: Work) -> float:
        """Return the seconds that GPUs which share a layer wait for each other.

        Python issues the chunks of one after those of another, and hidden states and sums cross between them.
        """
        devices = work.experts.sent_to(self.amounts.use.tokens) if work.experts else ()
        if not devices or devices[0] == "cpu":
            return 0.0
        first = self._gpu(devices[0])
        if len(devices) < 2:
            return self._exchanged(work, first) if self.processes > 1 else 0.0
        issued = self.amounts.issued(work) * _ISSUED * first.operator.median
        link = first.bus.median / 2 if self.rates.peer is None else self.rates.peer.median
        return (len(devices) - 1) * (issued + 2 * states(work, self.amounts) / link)

    def _exchanged(self, work: Work, gpu: GpuRates) -> float:
        """Return the seconds in which processes exchange the rows and the sums of a layer whose experts they share."""
        assert work.experts is not None, "the caller asks for experts"
        if work.experts.resident:
            return 0.0
        link = gpu.bus.median / 2 if self.rates.peer is None else self.rates.peer.median
        return (self.processes - 1) * _EXCHANGED * self.amounts.use.tokens * work.hidden / link

    def _bus(self, buses: int, device: str) -> float:
        """Return the bytes/s of one of several buses that work at once."""
        alone, together = self._gpu(device).bus.median, self.rates.buses
        return alone if together is None or buses == 1 else min(alone, together.median / buses)

    def optimizer(self, works: Iterable[Work]) -> float:
        """Return the seconds of AdamW over all adapters."""
        cpu, seconds, gpus = self.rates.cpu, 0.0, set[str]()
        for work in works:
            nbytes = work.adapter * _OPTIMIZER_BYTES
            device = (work.experts.adapters_on if work.experts else "") or work.device
            if device == "cpu":
                issued = work.adapters * _OPTIMIZER_OPERATORS * cpu.operator.median
                seconds += nbytes / at(cpu.bandwidth, self.threads) + issued
            else:
                gpu = self._gpu(device)
                seconds += nbytes / gpu.bandwidth.median + work.adapters * _OPTIMIZER_LAUNCHES * gpu.launch.median
                gpus |= {device} if work.adapters else set()
        return seconds + sum(_UPDATE * self.operator(device) for device in gpus)


def at(figures: Mapping[int, Figure], threads: int) -> float:
    """Return the figure of `threads` threads, on the line between the two counts around it."""
    counts = sorted(figures)
    below = max((count for count in counts if count <= threads), default=counts[0])
    above = min((count for count in counts if count >= threads), default=counts[-1])
    if below == above:
        return figures[below].median
    share = (threads - below) / (above - below)
    return (1 - share) * figures[below].median + share * figures[above].median


def _is_coded(work: Work) -> bool:
    return work.packed and isinstance(FORMATS.get(work.weight_format), Codes | Blocks)


def _products_of(gpu: GpuRates, work: Work) -> float:
    """Return the FLOP/s of products; those with codes count as products of bf16."""
    if work.weight_format == "fp32":
        return gpu.products["fp32"].median
    return (gpu.grouped if work.experts else gpu.products["bf16"]).median

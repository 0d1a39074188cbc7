"""Work, a use and rates -> `Prediction`: how long one call takes, and which engine it waits for.

Each product takes the longer of its FLOPs and its bytes (the roofline model, Williams et al., 2009). On the CPU, one
module follows another. A GPU works while Python issues the next operators and the bus sends the next layers' experts.
It waits for experts on the CPU, whose hidden states cross the bus both ways.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ktc.foundation.rates import CpuRates, Figure, GpuRates, Rates
from ktc.stages.cost.types import Prediction, Use, Work

_BACK_OPERATORS: Final = 2.0  # operators and moved bytes of backward, in those of forward
_EXPERTS_BACK: Final = 5 / 3  # products of experts in backward: gate and up again, then three gradients
_OPTIMIZER_BYTES: Final = 28  # of AdamW per fp32 parameter: gradient, two moments, the parameter, read and written
_OPTIMIZER_OPERATORS: Final = 14  # per tensor on the CPU, with the norm that clips


@dataclass(frozen=True, slots=True)
class Issue:
    """How the operators of a step are issued: by PyTorch, as a CUDA graph, or as one native program on the CPU."""

    cuda_graph: bool = False
    native_step: bool = False


AS_PYTORCH: Final = Issue()


def predict(works: Sequence[Work], use: Use, rates: Rates, threads: int, issue: Issue = AS_PYTORCH) -> Prediction:
    """Return the prediction of one call on a machine with these rates, whose CPU kernels have `threads` threads."""
    clock = _Clock(use, rates, threads, issue if use.phase == "decode" else AS_PYTORCH)
    gpu = next((work.device for work in works if work.kind == "attention" and work.device != "cpu"), "")
    engines, kinds = defaultdict[str, float](float), defaultdict[str, float](float)
    crossings = waited = 0.0
    for work in works:
        busy = clock.seconds(work)
        for engine, seconds in busy.items():
            engines[engine] += seconds
        kinds[work.kind] += max(busy.values(), default=0.0)
        if gpu and work.experts is not None and "cpu" in busy:
            crossed = clock.crossing(gpu, work)
            crossings, waited = crossings + crossed, waited + crossed + busy["cpu"]
    if use.trains:
        kinds["optimizer"] = clock.optimizer(works)
        engines["host" if gpu else "cpu"] += kinds["optimizer"]
    binds = max(engines, key=lambda name: engines[name])
    return Prediction(use, _total(engines, waited), kinds, engines, crossings, binds)


def _total(engines: Mapping[str, float], waited: float) -> float:
    """Return the seconds of a call: what runs side by side, then what a GPU waits for."""
    beside = {engine: seconds for engine, seconds in engines.items() if engine != "cpu"}
    if not beside:
        return engines["cpu"]
    cpu_alone = max(0.0, engines.get("cpu", 0.0) - waited)
    return max(beside.values()) + waited + cpu_alone


class _Clock:
    """The seconds of works in one use."""

    def __init__(self, use: Use, rates: Rates, threads: int, issue: Issue) -> None:
        self._use, self._rates, self._threads, self._issue = use, rates, threads, issue

    def seconds(self, work: Work) -> dict[str, float]:
        """Return the busy seconds of each engine."""
        if work.experts is not None:
            return self._experts(work)
        if work.device == "cpu":
            return {"cpu": self._on_cpu(work)}
        busy = self._on_gpu(work, work.device)
        if work.streamed:
            busy[f"bus:{work.device}"] = self._passes * work.streamed / self._gpu(work.device).bus.median
        return busy

    @property
    def _passes(self) -> int:
        """How often weights are read."""
        return 1 + self._use.trains + self._again

    @property
    def _again(self) -> int:
        return int(self._use.trains and self._use.checkpointing)

    def _flops(self, work: Work) -> float:
        """Return the FLOPs of products with frozen weights, and with LoRA's factors."""
        tokens, use = self._use.tokens, self._use
        if work.kind == "lm_head" and use.phase == "prefill":
            tokens = use.batch  # only the last position has logits
        back = (_EXPERTS_BACK if work.experts else 1.0) if use.trains else 0.0
        frozen = 2 * tokens * work.products * (1 + self._again + back)
        share = work.experts.top_k / work.experts.count if work.experts else 1.0
        return frozen + 6 * tokens * work.adapter * share * use.trains

    def _scored(self, work: Work) -> float:
        """Return the FLOPs of attention's scores and values: backward has twice those of forward, and forward again."""
        passes = 1 + self._again + (2.5 if self._use.trains else 0)
        return 2 * self._use.tokens * self._use.positions * work.scores * passes

    def _moved(self, work: Work) -> float:
        """Return the bytes that operators read and write beside weights."""
        tokens = self._use.batch if work.kind == "lm_head" and self._use.phase == "prefill" else self._use.tokens
        passes = 1 + self._again + (_BACK_OPERATORS if self._use.trains else 0)
        cached = self._use.batch * self._use.length * work.cached * (self._use.phase == "decode")
        return tokens * work.moved * passes + cached

    def _operators(self, work: Work) -> float:
        return work.operators * (1 + self._again + (_BACK_OPERATORS if self._use.trains else 0))

    # On the CPU ------------------------------------------------------------------------------------------------------
    def _on_cpu(self, work: Work) -> float:
        cpu = self._rates.cpu
        bandwidth = at(cpu.bandwidth, self._threads)
        products = max(self._flops(work) / self._cpu_products(work), self._passes * work.weights / bandwidth)
        scored = self._scored(work) / self._cpu_products(work)
        one = cpu.call if self._issue.native_step else cpu.operator
        return products + scored + self._moved(work) / bandwidth + self._operators(work) * one.median

    def _cpu_products(self, work: Work) -> float:
        products: CpuRates = self._rates.cpu
        by_threads = products.products.get(work.weight_format) or products.products["bf16"]
        return at(by_threads, self._threads)

    # On a GPU --------------------------------------------------------------------------------------------------------
    def _on_gpu(self, work: Work, device: str) -> dict[str, float]:
        gpu = self._gpu(device)
        rate, bandwidth = _gpu_products(gpu, work.weight_format), gpu.bandwidth.median
        products = max(self._flops(work) / rate, self._passes * work.weights / bandwidth)
        busy = products + self._scored(work) / rate + self._moved(work) / bandwidth
        one = gpu.graph_node if self._issue.cuda_graph else gpu.launch
        return {device: busy, "host": self._operators(work) * one.median}

    def _gpu(self, device: str) -> GpuRates:
        return self._rates.gpus[int(device.partition(":")[2] or 0)]

    def crossing(self, device: str, work: Work) -> float:
        """Return the seconds of hidden states to the CPU and back, per pass, and of the host's part in it."""
        gpu, tokens = self._gpu(device), self._use.tokens
        nbytes = 2 * tokens * work.moved / max(1.0, work.operators)
        host = gpu.host_node if self._issue.cuda_graph else gpu.launch
        return (1 + self._use.trains) * (nbytes / gpu.bus.median + 2 * host.median)

    # Routed experts --------------------------------------------------------------------------------------------------
    def _experts(self, work: Work) -> dict[str, float]:
        experts = work.experts
        assert experts is not None, "the caller asks for experts"
        touched = experts.touched(self._use.tokens)
        read = replace(work, weights=work.weights * touched)
        devices = experts.sent_to(self._use.tokens)
        if devices in ((), ("cpu",)):
            return {"cpu": self._on_cpu(read)}
        busy: dict[str, float] = {}
        for device in devices:
            for engine, seconds in self._on_gpu(read, device).items():
                busy[engine] = busy.get(engine, 0.0) + seconds / (len(devices) if engine != "host" else 1)
            if not experts.resident:
                busy[f"bus:{device}"] = self._passes * work.weights / len(devices) / self._bus(len(devices), device)
        return busy

    def _bus(self, buses: int, device: str) -> float:
        """Return the bytes/s of one of several buses that work at once."""
        alone, together = self._gpu(device).bus.median, self._rates.buses
        return alone if together is None or buses == 1 else min(alone, together.median / buses)

    def optimizer(self, works: Iterable[Work]) -> float:
        """Return the seconds of AdamW over all adapters."""
        cpu, seconds = self._rates.cpu, 0.0
        for work in works:
            nbytes = work.adapter * _OPTIMIZER_BYTES
            if work.device == "cpu":
                seconds += nbytes / at(cpu.bandwidth, self._threads)
                seconds += work.adapters * _OPTIMIZER_OPERATORS * cpu.operator.median
            else:
                gpu = self._gpu(work.device)
                seconds += nbytes / gpu.bandwidth.median + work.adapters * gpu.launch.median / 2
        return seconds


def at(figures: Mapping[int, Figure], threads: int) -> float:
    """Return the figure of the most threads that are no more than `threads`, or of the fewest."""
    fitting = [count for count in figures if count <= threads]
    return figures[max(fitting) if fitting else min(figures)].median


def _gpu_products(gpu: GpuRates, weight_format: str) -> float:
    """Return the FLOP/s of products: those of codes are made bf16 first."""
    return (gpu.products["fp32"] if weight_format == "fp32" else gpu.products["bf16"]).median

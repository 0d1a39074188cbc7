"""The measurements of a training run: frozen values, computed from the times of its steps, and their JSON.

In: `StepTimes` and the tokens of each step. Out: `RunReport`. Nothing is measured here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from ktc.model.experts.streamed.stream_ring import StreamFigures
from ktc.model.kernels.kernel_clock import KernelCall
from ktc.training.trainers.phases import PHASES, StepTimes

FILE = "ktc_report.json"
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of a step over all processes: `real` without padding, `padded` with it, and `learned` with a loss."""

    real: int
    padded: int
    learned: int


@dataclass(frozen=True, slots=True)
class Speed:
    """Means over all steps except the first, which warms up. Seconds, tokens, and tokens per second.

    `nominal` counts as the papers do: accumulation times sequences times the longest length, padding included.
    """

    steps: int
    step_time: float
    tokens_per_step: float
    padded_per_step: float
    nominal_per_step: int
    tokens_per_second: float
    nominal_tokens_per_second: float


@dataclass(frozen=True, slots=True)
class ExpertsSpeed:
    """One direction of the experts' kernels, per step: seconds, tokens times layers, FLOPs and rates.

    FLOPs are 2 per multiply and add of the frozen matrices: 6 k H I per token and layer with a gate, and the
    same for the gradient of the input. LoRA's FLOPs are separate (forward 2 per weight of the factors, backward 6) and
    not in `tflops`.
    """

    seconds: float
    token_layers: float
    flops: float
    lora_flops: float
    tflops: float


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Peak bytes of one GPU since training began."""

    device: str
    allocated: int
    reserved: int


@dataclass(frozen=True, slots=True)
class StreamTraffic:
    """The weights sent to one device in a step: bytes, bytes that were not used, and seconds that it waited for them.

    `speed` is that of the copies, `bus_speed` that of copies while nothing else runs, both in bytes per second as
    measured in this run; `bus_share` is the part of the step in which a bus at `bus_speed` would have been busy.
    """

    device: str
    bytes_per_step: float
    dropped_per_step: float
    speed: float
    bus_speed: float
    bus_share: float
    waiting_per_step: float

    def __str__(self) -> str:
        sent = f"{self.bytes_per_step / 1e9:.2f} GB a step at {self.speed / 1e9:.1f} GB/s"
        bus = f"{self.bus_share:.0%} of the {self.bus_speed / 1e9:.1f} GB/s of its bus"
        return f"{sent}, {bus}; it waited {self.waiting_per_step:.3f} s a step"


@dataclass(frozen=True, slots=True)
class Logged:
    """One line of the trainer's log. A missing value is None.

    `reward_margin` is of preferences: how much more the good answers have gained than the bad ones.
    """

    step: int
    loss: float | None = None
    eval_loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    reward_margin: float | None = None


@dataclass(frozen=True, slots=True)
class RunReport:
    """All measurements. `phases` has seconds per step; `host_peak_rss` is of the whole process, in bytes."""

    model: str
    steps: int
    epochs: float
    seconds: float
    finished: bool
    speed: Speed | None
    phases: Mapping[str, float]
    experts: Mapping[str, ExpertsSpeed]
    gpus: tuple[DeviceMemory, ...]
    host_peak_rss: int
    trainable_parameters: int
    total_parameters: int
    processes: int
    micro_batch: int
    accumulation: int
    length: int
    stacking: str
    linears: str
    history: tuple[Logged, ...]
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    streams: tuple[StreamTraffic, ...] = ()
    offload: str = ""  # how routed experts are computed on GPUs
    expert_adapters: str = ""  # where their adapters are while they train

    def to_json(self) -> dict[str, Any]:
        """Return plain values. JSON has no NaN or infinity: such a loss is the text `nan`, `inf` or `-inf`."""
        history = [{name: _plain(value) for name, value in asdict(line).items()} for line in self.history]
        return {"schema": SCHEMA, **asdict(self), "history": history}


def _plain(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(float(value))


def speed(steps: Sequence[StepTimes], tokens: Sequence[StepTokens], nominal: int) -> Speed | None:
    """Means over all steps except the first; a single step counts itself. None without any step."""
    if not steps:
        return None
    measured, counted = steps[1:] or steps, tokens[1:] or tokens
    seconds, real = fmean(step.seconds for step in measured), fmean(step.real for step in counted)
    return Speed(
        steps=len(measured),
        step_time=seconds,
        tokens_per_step=real,
        padded_per_step=fmean(step.padded for step in counted),
        nominal_per_step=nominal,
        tokens_per_second=real / seconds,
        nominal_tokens_per_second=nominal / seconds,
    )


def traffic(before: StreamFigures, after: StreamFigures, steps: int, seconds: float) -> StreamTraffic:
    """Return the traffic between two readings that are `steps` steps and `seconds` apart."""
    sent, copying = after.sent - before.sent, after.copying - before.copying
    return StreamTraffic(
        after.device,
        sent / steps,
        (after.dropped - before.dropped) / steps,
        sent / copying if copying else 0.0,
        after.bus_speed,
        sent / after.bus_speed / seconds if after.bus_speed and seconds else 0.0,
        (after.waiting - before.waiting) / steps,
    )


def phases(steps: Sequence[StepTimes]) -> dict[str, float]:
    """Seconds per step of each phase, over the steps that `speed` counts. They add up to its step time."""
    measured = steps[1:] or steps
    return {phase: fmean(step.phases[phase] for step in measured) for phase in PHASES} if measured else {}


def experts(steps: Sequence[StepTimes], gated: bool) -> dict[str, ExpertsSpeed]:
    """Return each direction that kernels ran in, per step. Recomputation in backward is a direction of its own."""
    measured = steps[1:] or steps
    calls: dict[str, list[KernelCall]] = {}
    for step in measured:
        for phase, call in step.calls:
            calls.setdefault(phase, []).append(call)
    return {phase: _experts(calls[phase], gated, len(measured)) for phase in PHASES if phase in calls}


def _experts(calls: Sequence[KernelCall], gated: bool, steps: int) -> ExpertsSpeed:
    seconds, flops = sum(call.seconds for call in calls), sum(_flops(call, gated) for call in calls)
    return ExpertsSpeed(
        seconds=seconds / steps,
        token_layers=sum(call.tokens for call in calls) / steps,
        flops=flops / steps,
        lora_flops=sum(_lora_flops(call, gated) for call in calls) / steps,
        tflops=flops / seconds / 1e12 if seconds else 0.0,
    )


def _flops(call: KernelCall, gated: bool) -> float:
    _, hidden, intermediate, top_k = call.sizes
    return 2.0 * call.tokens * top_k * (3 if gated else 2) * hidden * intermediate


def _lora_flops(call: KernelCall, gated: bool) -> float:
    """Count LoRA's FLOPs: two factors per token and product. Backward computes the gradients of input and factors."""
    _, hidden, intermediate, top_k = call.sizes
    first, down = call.ranks
    weights = first * (hidden + intermediate * (2 if gated else 1)) + down * (hidden + intermediate)
    return (2.0 if call.kind == "forward" else 6.0) * call.tokens * top_k * weights

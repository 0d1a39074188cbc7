"""The result of a run: one row per way to compute a step, the ways that were left out, and what was measured where."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ktc.tools.bench.finetune.request import Impl
from ktc.training.trainers.run_report import StreamTraffic

SCHEMA = 1
_NAMES = {
    "gpu": "ktc, experts streamed to the GPU",
    "cpu": "ktc, experts on the CPU",
    "reference": "reference: fp32, PyTorch on the CPU",
}


@dataclass(frozen=True, slots=True)
class Split:
    """A step of `batch * accumulation` sequences, with activations saved or, by checkpointing, computed again."""

    batch: int
    accumulation: int
    checkpointing: bool = False

    def __str__(self) -> str:
        return f"batch {self.batch} x {self.accumulation}" + ", checkpointing" * self.checkpointing


@dataclass(frozen=True, slots=True)
class WholeDepth:
    """The estimate for all layers: the measured step times the ratio of layers with experts."""

    layers: int
    step_time: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Row:
    """One way to compute a step. Seconds and bytes; GPU memory is the peak of these steps, over all GPUs.

    `step_time` is the median of `step_times` without the first and a traced one. `host_peak_rss` is that of the process
    until then. `experts` is `gpu` or `cpu` for experts in host memory, `resident` for a model that is on the GPU as a
    whole, `reference` for ktc's model in fp32 as plain PyTorch. `grad_norms` are before clipping. `phases` are seconds
    per step, with a traced step. `streams` are the weights sent to each device, `offload` says how experts are computed
    there. `best`: no row of this implementation is faster, references aside.
    """

    impl: Impl
    experts: str
    split: Split
    tokens_per_second: float
    step_time: float
    step_times: tuple[float, ...]
    gpu_allocated: int
    gpu_reserved: int
    host_peak_rss: int
    losses: tuple[float, ...]
    phases: Mapping[str, float]
    grad_norms: tuple[float, ...] = ()
    stacking: str = ""
    streams: tuple[StreamTraffic, ...] = ()
    offload: str = ""
    whole_depth: WholeDepth | None = None
    best: bool = False

    @property
    def name(self) -> str:
        """The row in a table or a picture."""
        return _NAMES.get(self.experts, "stock HF + PEFT")


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An implementation, or one of its splits, that was not measured, and why."""

    impl: Impl
    split: str
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run. `seconds` has the times of preparation: the compiler's stages, `load` and the peer's model.

    `request` are the words that it was asked with. `notes` are facts about all rows.
    """

    machine: Mapping[str, str]
    request: Mapping[str, Any]
    layers: int
    depth: int
    tokens_per_step: int
    seconds: Mapping[str, float]
    rows: tuple[Row, ...]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the object that `ktc bench finetune --json` prints."""
        return {"schema": SCHEMA, **asdict(self)}


def median_step(step_times: Sequence[float], traced: int | None = None) -> float:
    """Return the median of the steps except the first, in which memory is allocated and functions are compiled.

    `traced` is the number of a step, from 1, that does not count either.
    """
    return statistics.median(time for step, time in enumerate(step_times, 1) if step not in (1, traced))


def marked(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows with `best` set on the fastest of each implementation. A reference is not for its speed."""
    fast = [row for row in rows if row.experts != "reference"]
    fastest = {row.impl: min(each.step_time for each in fast if each.impl == row.impl) for row in fast}
    return tuple(replace(row, best=row in fast and row.step_time == fastest[row.impl]) for row in rows)


def whole_depth(row: Row, depth: int, times: float) -> Row:
    """Return the row with an estimate for `depth` layers, `times` as many of which have experts."""
    return replace(row, whole_depth=WholeDepth(depth, row.step_time * times, row.tokens_per_second / times))

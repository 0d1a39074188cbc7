"""The result of `ktc bench finetune`: a row per way to compute a step, and the ways that were left out."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ktc.tools.bench.plot import Curve, curves
from ktc.tools.bench.report import LeftOut, column, table_of
from ktc.tools.bench.stack import StackReport
from ktc.training.trainers.run_report import StreamTraffic

if TYPE_CHECKING:
    from rich.table import Table

_GB = 1e9
_NAMES = {
    "gpu": "ktc, experts streamed to the GPU",
    "cpu": "ktc, experts on the CPU",
    "reference": "reference: fp32, PyTorch on the CPU",
}
_PANELS = {"loss": "losses", "gradient norm before clipping": "grad_norms"}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way to compute a step. Seconds and bytes; GPU memory is the peak of these steps, over all GPUs.

    `step_time` is the median of `step_times` without the first and a traced one. `host_peak_rss` is that of the process
    until then. `experts` is `gpu` or `cpu` for experts in host memory, `resident` for a model that is on the GPU as a
    whole, `reference` for ktc's model in fp32 as plain PyTorch. `grad_norms` are before clipping. `phases` are seconds
    per step, with a traced step. `streams` are the weights sent to each device, `offload` says how experts are computed
    there. `best`: no row of this implementation is faster, references aside.
    """

    impl: Literal["ktc", "hf"]
    experts: str = column("", lambda row: row.name, left=True)
    split: Split = column("split", left=True)
    tokens_per_second: float = column("token/s", "{:,.0f}")
    step_time: float = column("step s", "{:.2f}")
    step_times: tuple[float, ...]
    gpu_allocated: int = column("GPU GB", lambda row: f"{row.gpu_allocated / _GB:.2f}")
    gpu_reserved: int = column("reserved", lambda row: f"{row.gpu_reserved / _GB:.2f}")
    host_peak_rss: int = column("host GB", lambda row: f"{row.host_peak_rss / _GB:.1f}")
    losses: tuple[float, ...] = column("loss", lambda row: f"{row.losses[0]:.3f} to {row.losses[-1]:.3f}")
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

    def facts(self) -> Iterator[str]:
        """Yield lines below the table."""
        name = self.name if self.impl == "ktc" else f"{self.name}, {self.split}"
        if self.phases:
            spent = (f"{phase} {seconds:.3f} s" for phase, seconds in self.phases.items() if seconds)
            yield f"{name}: {', '.join(spent)}"
        if self.stacking:
            yield f"{name}: {self.stacking}"
        if self.offload:
            yield f"{name}: routed experts by {self.offload}"
        for stream in self.streams:
            yield f"{name}: weights sent to {stream.device}: {stream}"
            if stream.dropped_per_step:
                yield f"{name}: sent for nothing to {stream.device}: {stream.dropped_per_step / _GB:.2f} GB a step"
        if (whole := self.whole_depth) is not None:
            estimate = f"{whole.tokens_per_second:,.0f} token/s, step {whole.step_time:.2f} s"
            yield f"{name}: extrapolated to {whole.layers} layers, by those with experts: {estimate}"

    def distance(self, reference: Row) -> str:
        """Return how far the curves are from those of the reference."""
        loss = max(abs(one - other) for one, other in zip(self.losses, reference.losses, strict=True))
        norms = zip(self.grad_norms, reference.grad_norms, strict=True)
        norm = max((abs(one / other - 1) for one, other in norms if other), default=0.0)
        near = f"loss within {loss:.5f} of the reference, gradient norm within {norm:.2%}"
        return f"{self.name}: {near}, over {len(self.losses)} steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneReport(StackReport):
    """`notes` are facts about all rows."""

    tokens_per_step: int
    notes: tuple[str, ...] = ()

    def shown(self) -> Iterator[str | Table]:
        """Yield the rows, the facts about them, and the reason for each missing measurement."""
        if self.rows:
            yield self.headline(f"{self.tokens_per_step:,} tokens per step")
            yield table_of(self.rows, style=lambda row: "bold" if row.best else "")
        else:
            yield "nothing was measured"
        for row in self.rows:
            yield from row.facts()
        reference = next((row for row in self.rows if row.experts == "reference"), None)
        if reference is not None:
            yield from (row.distance(reference) for row in self.rows if row is not reference and row.impl == "ktc")
        yield from self.notes
        yield from self.not_measured()

    def figure(self) -> Any:
        """Return the curves of loss and gradient norm, a line per row."""
        title = f"{self.request['model']}, {self.of_depth}, {self.tokens_per_step:,} tokens per step"
        lines = [
            Curve(row.name, {panel: getattr(row, name) for panel, name in _PANELS.items()}, row.experts == "reference")
            for row in self.rows
        ]
        return curves(title, tuple(_PANELS), lines)


def not_measured(reason: str, split: str = "") -> LeftOut:
    """Return that the peer, or one of its splits, was not measured, and why."""
    return LeftOut("hf", reason, split, {"split": split})


def median_step(step_times: Sequence[float], traced: int | None = None) -> float:
    """Return the median of the steps except the first, in which memory is allocated and functions are compiled.

    `traced` is the number of a step, from 1, that does not count either.
    """
    return statistics.median(time for step, time in enumerate(step_times, 1) if step not in (1, traced))


def marked(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows with `best` set on the fastest of each implementation. A reference is not for its speed."""
    fast = [row for row in rows if row.experts != "reference"]
    fastest = {row.impl: min(entry.step_time for entry in fast if entry.impl == row.impl) for row in fast}
    return tuple(replace(row, best=row in fast and row.step_time == fastest[row.impl]) for row in rows)


def whole_depth(row: Row, depth: int, times: float) -> Row:
    """Return the row with an estimate for `depth` layers, `times` as many of which have experts."""
    return replace(row, whole_depth=WholeDepth(depth, row.step_time * times, row.tokens_per_second / times))

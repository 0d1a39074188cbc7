"""The values of a training run: its paths, its data as tokens, its progress and its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ktc.diagnostics import Diagnostic
from ktc.training.tune.tokenised import TokenisedData

if TYPE_CHECKING:
    from ktc.training.trainers.run_report import RunReport

Observe = Callable[[str, object], None]
Stop = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Where a run reads and writes. `resume` is "auto" or a checkpoint's path; `weights` the checkpoint if it moved."""

    out: Path
    output: Path
    resume: str | None = None
    force: bool = False
    weights: Path | None = None
    trusted: bool = False
    trace: Path | None = None  # the file for the timeline of one step


@dataclass(frozen=True, slots=True)
class PreparedData:
    """Rows to learn from, and rows that are held out."""

    train: TokenisedData
    held_out: TokenisedData | None

    @property
    def notes(self) -> tuple[Diagnostic, ...]:
        """The warnings of both, each once."""
        return tuple(dict.fromkeys((*self.train.notes, *(self.held_out.notes if self.held_out else ()))))


@dataclass(frozen=True, slots=True)
class TrainResult:
    """`interrupted` says that the last checkpoint is in `output` and no adapter of a finished run."""

    output: Path
    report: RunReport
    data: PreparedData
    interrupted: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """After a step: its number and that of all, the last loss, and real tokens per second of the last steps."""

    step: int
    steps: int
    loss: float | None
    tokens_per_second: float

"""The result of a run: rows, the ways that were left out, and the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ktc.tools.bench.generate.request import Impl

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Row:
    """The steps of one `generate`: `ms` is the median from token to token, for all sequences of the batch.

    `tokens_per_second` are those of all sequences. `experts_ms` is the time in which the CPU reads the experts of a
    step at `read_gbps`, the bandwidth before and after the row; None where no expert is on the CPU. `told` says why
    steps were not graphs. Memory in bytes.
    """

    impl: Impl
    batch: int
    context: int
    steps: int
    ms: float
    best_ms: float
    tokens_per_second: float
    prompt_seconds: float
    read_gbps: float
    experts_ms: float | None
    gpu_allocated: int
    told: str = ""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A way to compute that was not measured, and why."""

    impl: Impl
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run. `seconds` has the times of compiling and loading."""

    machine: Mapping[str, str]
    request: Mapping[str, Any]
    layers: int
    depth: int
    seconds: Mapping[str, float]
    rows: tuple[Row, ...]
    left_out: tuple[LeftOut, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the object that `ktc bench generate --json` prints."""
        return {"schema": SCHEMA, **asdict(self)}

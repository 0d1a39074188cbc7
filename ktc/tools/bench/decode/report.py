"""The result of `ktc bench decode`: rows, agreement of the engines, where a step goes, and the machine's bandwidth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import geometric_mean
from typing import Any

from ktc.tools.bench.decode.request import Case


@dataclass(frozen=True, slots=True)
class Row:
    """One engine in one case. `ms` is the median of the rounds, of a decode step or of a whole prompt.

    It is CPU time with one thread, wall time with more. `floor_ms` is the time that reading the active weights and the
    cache takes at the bandwidth of the same rounds, None for a prefill. `ktc_speedup` is the speed of ktc relative to
    this row, the median of the ratios of each round; None for ktc's own rows.
    """

    impl: str
    case: Case
    ms: float
    best_ms: float
    cpu_ms: float
    wall_ms: float
    rounds: int
    read_gbps: float
    floor_ms: float | None = None
    ktc_speedup: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all sequences together."""
        tokens = self.case.batch if self.case.kind == "decode" else self.case.tokens
        return tokens / self.ms * 1e3

    @property
    def share_of_floor(self) -> float | None:
        """The floor over the time: 1 would be the speed of memory."""
        return None if self.floor_ms is None else self.floor_ms / self.ms

    def to_json(self) -> dict[str, Any]:
        """Return the row with its shares; the case is spread."""
        values = asdict(self)
        derived = {"tokens_per_second": self.tokens_per_second, "share_of_floor": self.share_of_floor}
        return {**values.pop("case"), **values, **derived}


@dataclass(frozen=True, slots=True)
class Agreement:
    """How an engine's logits after some prompts compare with ktc's.

    `error` is the median relative Frobenius error, `same_next` in how many of the prompts the most probable token is
    the same, `common` the mean share of ktc's ten most probable tokens among its ten.
    """

    impl: str
    prompts: int
    error: float
    same_next: int
    common: float


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run. `parts` has the milliseconds of a step of ktc by case and part, empty without `--profile`."""

    host: Mapping[str, Any]
    model: str
    file_format: str
    layers: int
    read_gbps: float
    rows: tuple[Row, ...]
    agreement: tuple[Agreement, ...]
    parts: Mapping[str, Mapping[str, float]]

    def speedup_over(self, impl: str) -> float | None:
        """Return the geometric mean of ktc's speed relative to an engine over all cases."""
        found = [row.ktc_speedup for row in self.rows if row.impl == impl and row.ktc_speedup]
        return geometric_mean(found) if found else None

    def to_json(self) -> dict[str, Any]:
        """Return the object that `ktc bench decode --json` prints."""
        others = dict.fromkeys(row.impl for row in self.rows if row.ktc_speedup is not None)
        return {
            "host": dict(self.host),
            "model": self.model,
            "format": self.file_format,
            "layers": self.layers,
            "read_gbps": self.read_gbps,
            "rows": [row.to_json() for row in self.rows],
            "agreement": [asdict(each) for each in self.agreement],
            "speedup": {impl: self.speedup_over(impl) for impl in others},
            "parts": {case: dict(parts) for case, parts in self.parts.items()},
        }

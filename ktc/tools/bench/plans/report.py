"""The result of `ktc bench plans`: a row per plan and use, and how near the chosen plan is to the best one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ktc.tools.bench.report import column, table_of
from ktc.tools.bench.stack import StackReport

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan in one use. Seconds of a call; `kinds` are the predicted and the measured seconds of each kind."""

    plan: str = column("plan", left=True)
    use: str = column("", left=True)
    predicted: float = column("predicted ms", lambda row: f"{1e3 * row.predicted:,.1f}")
    measured: float = column("measured ms", lambda row: f"{1e3 * row.measured:,.1f}")
    ratio: float = column("ratio", "{:.2f}")
    spread: float = column("spread", "{:.0%}")
    waits_for: str = column("waits for", left=True)
    chosen: bool = column("", lambda row: "chosen" if row.chosen else "", left=True)
    kinds: Mapping[str, tuple[float, float]]
    tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlansReport(StackReport):
    """`sums` has by plan the measured seconds over its uses as the planner weighs them."""

    origin: str
    sums: Mapping[str, float]
    chosen: str

    @property
    def over_best(self) -> float:
        """The measured time of the chosen plan, as a multiple of that of the fastest."""
        return self.sums[self.chosen] / min(self.sums.values()) if self.chosen in self.sums else float("nan")

    def shown(self) -> Iterator[str | Table]:
        """Yield the rows, the kinds of the chosen plan, and the verdict."""
        yield self.headline(f"by {self.origin} rates")
        if self.rows:
            yield table_of(self.rows, section=lambda row: row.plan, style=lambda row: "bold" if row.chosen else "")
        yield from kinds_of(self.rows)
        yield from self.not_measured()
        if self.sums:
            yield f"the chosen plan takes {self.over_best:.2f} times as long as the fastest"


def kinds_of(rows: Iterable[Row]) -> Iterator[str]:
    """Yield a line for each row with the milliseconds of its kinds of modules."""
    for row in rows:
        if row.kinds:
            pairs = (f"{kind} {1e3 * p:,.1f}/{1e3 * m:,.1f}" for kind, (p, m) in row.kinds.items())
            yield f"{row.plan}, {row.use}, predicted/measured ms: {', '.join(pairs)}"

"""`ktc plan OUT --calibrate`: a step of each phase of a compiled model, beside its prediction.

In: a compiled model, whose recorded model, rules and settings are planned again here. Refused: another folder, a model
that has gone, and the refusals of planning and loading.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ktc import compiler
from ktc.foundation.isa import Isa
from ktc.model.manifest.manifest import read_manifest
from ktc.stages.choose import predictions_of
from ktc.stages.plan import BatchShape
from ktc.tools.bench.plans.issue_rates import issue_rates, with_issue_rates
from ktc.tools.bench.plans.measure import Sizes, times_of
from ktc.tools.bench.plans.report import Row, kinds_of
from ktc.tools.bench.plans.run import row_of
from ktc.tools.bench.progress import ProgressSink
from ktc.tools.bench.report import Report, table_of

if TYPE_CHECKING:
    from rich.table import Table

_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration(Report):
    """A row per phase. `origin` says where the rates are from.

    `operators` are the seconds of an operator on each GPU: as planned, and during the run, by which is predicted.
    """

    out: str
    origin: str
    isa: Isa
    rows: tuple[Row, ...]
    operators: tuple[tuple[float, float], ...]

    def shown(self) -> Iterator[str | Table]:
        """Yield the phases, then their kinds of modules."""
        yield f"{self.out}, {self.isa}, by {self.origin} rates"
        yield table_of(self.rows)
        yield from kinds_of(self.rows)
        for number, (planned, now) in enumerate(self.operators):
            yield f"an operator of cuda:{number}: {1e6 * planned:.1f} us as planned, {1e6 * now:.1f} us during the run"


def calibrated(
    out: Path, shape: BatchShape, seed: int | None, sink: ProgressSink, *, trust_remote_code: bool = False
) -> Calibration:
    """Return predicted and measured times of the compiled model `out`; a `seed` makes random weights."""
    manifest = read_manifest(out)
    rules = out / "rules" / manifest.rules.name
    analysis = compiler.analyse(
        str(manifest.model.folder or manifest.model.name), rules, manifest.rules.settings, observe=sink.stage,
        reading=compiler.Reading(trust_remote_code, random_weights=seed is not None),
    )  # fmt: skip
    uses = tuple(one.use for one in predictions_of(analysis.captured, analysis.plan, analysis.host, shape))
    before = issue_rates(analysis.host)
    times = times_of(out, analysis.captured, uses, Sizes(steps=_STEPS, seed=seed), sink)
    host = with_issue_rates(analysis.host, before, issue_rates(analysis.host))
    predictions = predictions_of(analysis.captured, analysis.plan, host, shape)
    operators = zip(analysis.host.rates.gpus, host.rates.gpus, strict=True)
    rows = tuple(
        row_of(manifest.rules.name, one, measured, chosen=True)
        for one, measured in zip(predictions, times, strict=True)
    )
    return Calibration(
        out=str(out),
        origin=analysis.host.rates.origin,
        isa=analysis.host.isas[0],
        rows=rows,
        operators=tuple((planned.operator.median, now.operator.median) for planned, now in operators),
    )

"""From a request to a report: every plan of a model that fits is compiled, loaded and measured beside its prediction.

In: a model, rules and rates of this machine. Out: a row per plan and use. Refused: what planning, compiling and loading
refuse. A plan that runs out of memory is a row that is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from ktc import compiler
from ktc.diagnostics import KtcError
from ktc.foundation.files import temporary_folder
from ktc.stages.analysis import Analysis
from ktc.stages.choose import Chosen, Priced, predictions_of, uses_of
from ktc.stages.cost import Prediction
from ktc.stages.plan import BatchShape
from ktc.stages.rewrite import rewrite
from ktc.tools.bench.plans.issue_rates import issue_rates, with_issue_rates
from ktc.tools.bench.plans.measure import Sizes, Times, times_of
from ktc.tools.bench.plans.report import PlansReport, Row
from ktc.tools.bench.progress import ProgressSink
from ktc.tools.bench.report import LeftOut
from ktc.tools.bench.requests import Plans
from ktc.tools.bench.stack import facts_of, stack_of, timed


def run(request: Plans, sink: ProgressSink) -> PlansReport:
    """Measure every plan, the chosen one first."""
    seconds, results = dict[str, float](), list[Row | LeftOut]()
    sums: dict[str, float] = {}
    with temporary_folder("plans") as folder:
        stack = stack_of(request.model, request.layers, folder / "config")
        with timed(seconds, "plan"):
            analysis = compiler.analyse(
                stack.model, request.rule, request.settings, observe=sink.stage, must_fit=_shape(request),
                reading=compiler.Reading(random_weights=True, to_compile=True),
            )  # fmt: skip
        for number, priced in enumerate(_wanted(analysis.chosen, request)):
            with timed(seconds, priced.candidate.name):
                rows = list(_measured(analysis, priced, folder / f"plan_{number}_of_bench", request, sink))
            results += rows
            measured = [row.measured for row in rows if isinstance(row, Row)]
            weights = [weight for _, weight in uses_of(analysis.plan.mode, _shape(request))]
            if len(measured) == len(weights):
                sums[priced.candidate.name] = sum(w * one for w, one in zip(weights, measured, strict=True))
    best = analysis.chosen.best.candidate.name
    rates = analysis.host.rates
    facts = facts_of(request, stack, "peft")
    return PlansReport.of(results, **facts, seconds=seconds, origin=rates.origin, sums=sums, chosen=best)


def _shape(request: Plans) -> BatchShape:
    return BatchShape(request.batch or None, request.length or None)


def _wanted(chosen: Chosen, request: Plans) -> Iterator[Priced]:
    """Yield the plans that fit and are not predicted to take too long."""
    for priced in chosen.priced:
        if not priced.lacks and priced.plan is not None and priced.predictions[0].seconds <= request.longest:
            yield priced


def _measured(
    analysis: Analysis, priced: Priced, out: Path, request: Plans, sink: ProgressSink
) -> Iterator[Row | LeftOut]:
    assert priced.plan is not None, "plans that fit are planned"
    chosen = replace(analysis.chosen, plan=priced.plan)
    analysis_of_plan = replace(analysis, chosen=chosen, blocks=rewrite(analysis.captured, priced.plan))
    name = priced.candidate.name
    uses = tuple(one.use for one in priced.predictions)
    sizes = Sizes(steps=request.steps, seed=request.seed, name=name)
    try:
        compiler.complete(analysis_of_plan, out, sink.stage)
        before = issue_rates(analysis.host)
        times = times_of(out, analysis.captured, uses, sizes, sink)
        host = with_issue_rates(analysis.host, before, issue_rates(analysis.host))
    except torch.OutOfMemoryError:
        yield LeftOut(name, "out of GPU memory")
        return
    except KtcError as error:
        yield LeftOut(name, error.diagnostics[0].message)
        return
    is_chosen = priced is analysis.chosen.best
    predictions = predictions_of(analysis.captured, priced.plan, host, _shape(request))
    for prediction, measured in zip(predictions, times, strict=True):
        row = row_of(name, prediction, measured, chosen=is_chosen)
        sink.finished(
            f"{name}, {row.use}: predicted {1e3 * row.predicted:,.1f} ms, measured {1e3 * row.measured:,.1f} ms"
        )
        yield row


def row_of(name: str, prediction: Prediction, measured: Times, *, chosen: bool) -> Row:
    """Return the row of one use."""
    kinds = {kind: (prediction.kinds.get(kind, 0.0), spent) for kind, spent in measured.kinds.items() if spent > 0}
    return Row(
        plan=name,
        use=str(measured.use),
        predicted=prediction.seconds,
        measured=measured.seconds,
        ratio=prediction.seconds / measured.seconds,
        spread=measured.spread,
        waits_for=prediction.binds,
        chosen=chosen,
        kinds=kinds,
        tokens_per_second=measured.use.tokens / measured.seconds,
    )

"""The picture of `ktc plan --plot`: modules on the rooflines of their engines, and speed over the bytes of a GPU.

In: a captured model and what was chosen in each case. Out: a `.png` or `.svg`. Raises as `plot.write_figure` does.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ktc.foundation.rates import Rates
from ktc.stages.capture import CapturedModel
from ktc.stages.choose import Case, Chosen
from ktc.stages.cost import predict, work_of
from ktc.stages.cost.amounts import Amounts
from ktc.stages.cost.predict import at
from ktc.tools.bench.plot import write_figure

_INTENSITIES: Final = tuple(2.0**power for power in range(-4, 15))


def draw(path: Path, captured: CapturedModel, cases: Sequence[tuple[Case, Chosen]]) -> None:
    """Draw the roofline of the first case's plan, and every candidate of every case by its bytes and its speed."""
    figures: Any = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(12, 5))
    roofline, frontier = figure.subplots(1, 2)
    _roofline(roofline, captured, *cases[0])
    _frontier(frontier, cases)
    write_figure(figure, path)


def _roofline(axes: Any, captured: CapturedModel, case: Case, chosen: Chosen) -> None:
    rates, best = case.host.rates, chosen.best
    plan, use = chosen.plan, best.predictions[-1].use
    for name, peak, bandwidth in _limits(rates, case.host.workers):
        axes.plot(_INTENSITIES, [min(peak, at_ * bandwidth) / 1e9 for at_ in _INTENSITIES], label=name, lw=1)
    amounts, drawn = Amounts(use), set[tuple[str, str]]()
    for work in work_of(captured, plan):
        if (work.kind, work.device) in drawn or not amounts.flops(work):
            continue
        drawn.add((work.kind, work.device))
        seconds = predict((work,), use, rates, case.host.workers).seconds
        reached = (amounts.flops(work) + amounts.scored(work)) / seconds / 1e9
        axes.plot([amounts.intensity(work)], [reached], "o")
        axes.annotate(f" {work.kind}", (amounts.intensity(work), reached), fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="GFLOP/s", title=f"{case.machine}: {use}")
    axes.legend(fontsize=8)


def _limits(rates: Rates, threads: int) -> list[tuple[str, float, float]]:
    cpu = rates.cpu
    limits = [("CPU", at(cpu.products["bf16"], threads), at(cpu.bandwidth, threads))]
    for number, gpu in enumerate(rates.gpus):
        limits.append((f"cuda:{number}", gpu.products["bf16"].median, gpu.bandwidth.median))
        limits.append((f"cuda:{number} by its bus", gpu.products["bf16"].median, gpu.bus.median))
    return limits


def _frontier(axes: Any, cases: Sequence[tuple[Case, Chosen]]) -> None:
    for case, chosen in cases:
        points = sorted(
            (sum(one.weights + one.streaming for one in priced.plan.devices if one.device != "cpu") / 1e9,
             priced.predictions[-1].tokens_per_second)
            for priced in chosen.priced
            if priced.plan is not None and not priced.lacks
        )  # fmt: skip
        budgets = ", ".join(f"{device} {nbytes / 1e9:.0f} GB" for device, nbytes in case.budgets.items())
        axes.plot([x for x, _ in points], [y for _, y in points], "o", label=f"{case.machine} {budgets}")
    axes.set(xlabel="GB on GPUs", ylabel="predicted token/s", title="plans that fit")
    axes.legend(fontsize=8)

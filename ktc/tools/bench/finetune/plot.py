"""The curves of a run: loss and gradient norm of every step, a line per row.

In: a report, and the path of the picture. Refused: a place that cannot be written (U003).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ktc.tools.bench.finetune.report import Report, Row
from ktc.tools.bench.picture import new_figure, write_figure

_DASHES = ("-", "--", "-.", ":")  # lines that lie upon each other stay visible
_FEW = 60  # steps that are marked


def draw(report: Report, path: Path) -> None:
    """Write the picture atomically. Raise InputRefused (U003)."""
    write_figure(_figure(report), path)


def _figure(report: Report) -> Any:
    figure = new_figure(10, 4.2)
    of_loss, of_norm = figure.subplots(1, 2)
    ordered = sorted(report.rows, key=lambda row: row.experts != "reference")  # the reference below the others
    for number, row in enumerate(ordered):
        _line(of_loss, row, row.losses, number)
        _line(of_norm, row, row.grad_norms, number)
    for axes, title in ((of_loss, "loss"), (of_norm, "gradient norm before clipping")):
        axes.set_xlabel("optimizer step")
        axes.set_title(title, fontsize=10)
        axes.grid(True, linewidth=0.3, alpha=0.5)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(_title(report), fontsize=10)
    figure.tight_layout()
    lines, names = of_loss.get_legend_handles_labels()
    if lines:
        figure.legend(lines, names, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=3, fontsize=8, frameon=False)
    return figure


def _line(axes: Any, row: Row, values: Sequence[float], number: int) -> None:
    width = 3.5 if row.experts == "reference" else 1.2
    marker = "." if len(values) <= _FEW else ""
    steps = range(1, len(values) + 1)
    axes.plot(steps, values, _DASHES[number % 4], marker=marker, linewidth=width, label=row.name, color=_color(row))


def _color(row: Row) -> str | None:
    return "lightgray" if row.experts == "reference" else None


def _title(report: Report) -> str:
    of_depth = "" if report.layers == report.depth else f" of {report.depth}"
    return f"{report.request['model']}, {report.layers}{of_depth} layers, {report.tokens_per_step:,} tokens per step"

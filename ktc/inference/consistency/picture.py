"""The picture of a comparison: for each cell and path the mean, the 99th percentile and the largest difference.

In: a report. Out: an SVG document. Values of 0 are on a line at the left, where a logarithm has no place for them.
Refused: matplotlib that is not installed (H242).
"""

from __future__ import annotations

import importlib
import importlib.util
import io
from typing import Any, Final

from ktc.diagnostics import Diagnostic, HostLacks
from ktc.inference.consistency.report import MEANINGS, PATHS, Report

_COLORS: Final = {"calls": "#5a9a5a", "prompt": "#4878a8", "decode": "#d08030"}
_MARKS: Final = (("mean", "o"), ("p99", "|"), ("largest", "x"))


def require_drawable() -> None:
    """Raise HostLacks (H242) if pictures cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        hint = "`pip install 'ktc[viz]'`, or leave `--plot` out"
        raise HostLacks(Diagnostic("H242", "the picture needs matplotlib, which is not installed", hint=hint))


def draw(report: Report) -> str:
    """Return the picture. Mismatched cells are shaded; the same report gives the same bytes."""
    figures: Any = importlib.import_module("matplotlib.figure")
    matplotlib: Any = importlib.import_module("matplotlib")
    figure = figures.Figure(figsize=(8, 0.9 + 0.75 * len(report.cells)), layout="constrained")
    axes = figure.add_subplot()
    floor = _floor(report)
    for row, cell in enumerate(report.cells):
        if not cell.matched and len(report.cells) > 1:
            axes.axhspan(row - 0.5, row + 0.5, color="#f4e3d8", zorder=0)
        for place, path in enumerate(PATHS):
            difference = cell.paths[path]
            for name, mark in _MARKS:
                value = getattr(difference, name)
                if value is not None:
                    axes.plot(max(value, floor), row + 0.25 * (place - 1), mark, color=_COLORS[path], markersize=6)
    for path in PATHS:
        axes.plot([], [], "s", color=_COLORS[path], label=f"{path}: {MEANINGS[path]}")
    for name, mark in _MARKS:
        axes.plot([], [], mark, color="gray", linestyle="", label=name)
    axes.set_xscale("log")
    axes.set_xlim(left=floor / 1.5)
    axes.axvline(floor, color="black", linewidth=0.5, linestyle=":")
    axes.annotate("0", (floor, len(report.cells) - 0.5), xytext=(0, -14), textcoords="offset points", ha="center")
    axes.set_ylim(len(report.cells) - 0.5, -0.5)
    axes.set_yticks(range(len(report.cells)), [f"{cell.trained} → {cell.served}" for cell in report.cells])
    axes.set_xlabel(f"absolute difference of log-probabilities, {report.against} → serving")
    axes.grid(True, axis="x", which="both", linewidth=0.3, alpha=0.5)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    written = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ktc"}):
        figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()


def _floor(report: Report) -> float:
    """Return a tenth of the smallest positive value, where values of 0 are drawn."""
    differences = [difference for cell in report.cells for difference in cell.paths.values()]
    values = [getattr(difference, name) for difference in differences for name, _ in _MARKS]
    positive = [value for value in values if value]
    return min(positive, default=1e-5) / 10

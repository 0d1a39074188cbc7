"""The pictures of a run: its losses over the steps, and the timeline of a step. SVG documents, by matplotlib.

In: the run's history, a step's timeline. Out: text, empty where there is nothing to draw or matplotlib is missing.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
from collections.abc import Sequence
from typing import Any

from ktc.training.trainers.run_report import Logged
from ktc.training.trainers.step_trace import Timeline


def loss_plot(history: Sequence[Logged]) -> str:
    """Return the losses over the steps."""
    if not history or not _can_draw():
        return ""
    figure, axes = _axes(8, 3.6)
    for name, label in (("loss", "training"), ("eval_loss", "held-out")):
        points = [(line.step, value) for line in history if (value := getattr(line, name)) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="." if len(points) < 60 else "", linewidth=1.2, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(True, linewidth=0.3, alpha=0.5)
    axes.legend(frameon=False)
    return _svg(figure)


def timeline_plot(timeline: Timeline | None) -> str:
    """Return a bar for each lane of a step, filled where the lane is busy."""
    if timeline is None or not timeline.lanes or not _can_draw():
        return ""
    figure, axes = _axes(8, 0.7 + 0.4 * len(timeline.lanes))
    for row, (lane, spans) in enumerate(timeline.lanes.items()):
        axes.broken_barh([(begin, end - begin) for begin, end in spans], (row - 0.35, 0.7))
        axes.text(1.01 * timeline.seconds, row, f"{timeline.share(lane):.0%}", va="center")
    axes.set_yticks(range(len(timeline.lanes)), list(timeline.lanes))
    axes.invert_yaxis()
    axes.set_xlim(0, timeline.seconds)
    axes.set_xlabel("seconds of the step")
    return _svg(figure)


def _can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def _axes(width: float, height: float) -> tuple[Any, Any]:
    figures: Any = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(width, height))
    return figure, figure.add_subplot()


def _svg(figure: Any) -> str:
    matplotlib: Any = importlib.import_module("matplotlib")
    written = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ktc"}):
        figure.savefig(written, format="svg", bbox_inches="tight", metadata={"Date": None})
    return written.getvalue()

"""The pictures of a run: its losses over the steps, and the timeline of a step. SVG documents, by matplotlib.

In: the run's history, a step's timeline. Out: text, empty where there is nothing to draw or matplotlib is missing.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import math
from collections.abc import Sequence
from typing import Any, Final

from ktc.training.trainers.run_report import Logged
from ktc.training.trainers.step_trace import Timeline

_SHORTEST_CURVE: Final = 10  # points; a shorter one is read as it is


def loss_plot(history: Sequence[Logged]) -> str:
    """Return the losses over the steps."""
    if not history or not _can_draw():
        return ""
    figure, axes = _axes(8, 3.6)
    for name, label in (("loss", "training"), ("eval_loss", "held-out")):
        points = [(line.step, value) for line in history if (value := getattr(line, name)) is not None]
        if not points:
            continue
        means = smoothed([value for _, value in points])
        marker, thin = "." if len(points) < 60 else "", bool(means)
        (line,) = axes.plot(*zip(*points, strict=True), marker=marker, linewidth=0.8 if thin else 1.2, label=label)
        if means:
            line.set_alpha(0.35)
            steps = [step for step, _ in points]
            axes.plot(steps, means, color=line.get_color(), linewidth=1.8, label=f"{label}, smoothed")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(True, linewidth=0.3, alpha=0.5)
    axes.legend(frameon=False)
    return _svg(figure)


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the mean around each point of a curve, in which a value fades over a fortieth of it to both sides.

    The result is empty for a short curve. A value that is not finite adds nothing.
    """
    if len(values) < _SHORTEST_CURVE:
        return []
    keep = 1 - 1 / max(3.0, len(values) / 40)
    before, after = _faded(values, keep), _faded(values[::-1], keep)[::-1]
    means = list[float]()
    for value, (left, left_weight), (right, right_weight) in zip(values, before, after, strict=True):
        counted = math.isfinite(value)  # in both sums
        weight = left_weight + right_weight - counted
        means.append((left + right - (value if counted else 0.0)) / weight if weight else math.nan)
    return means


def _faded(values: Sequence[float], keep: float) -> list[tuple[float, float]]:
    """Return the sum and the weight of the values up to each point, where an earlier value counts `keep` times less."""
    total = weight = 0.0
    sums = list[tuple[float, float]]()
    for value in values:
        counted = math.isfinite(value)
        total, weight = keep * total + (value if counted else 0.0), keep * weight + counted
        sums.append((total, weight))
    return sums


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

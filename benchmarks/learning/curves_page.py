"""The runs of `make learn-curves` as a table and a picture, and their place in docs/details/learning.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from learning.measured import with_measured

if TYPE_CHECKING:
    from learning.curves import Curve

PICTURE: Final = "learning-curves.svg"
MARKS: Final = ("<!-- measured by make learn-curves -->\n", "<!-- end of what make learn-curves measures -->\n")
LAST: Final = 20  # steps whose losses are averaged


def markdown(curves: Sequence[Curve], date: str, versions: str) -> str:
    """Return the table, and how it was measured."""
    seeds, steps = 1 + max(curve.seed for curve in curves), len(curves[0].losses)
    lines = [
        f"Measured {date} by `make learn-curves` ({versions}):",
        f"{steps} steps, {seeds} seeds; the mean, and the standard deviation over seeds.",
        "",
        f"| trained by | loss of the last {LAST} steps | held-out loss | of one seed, away from stock at most |",
        "| --- | ---: | ---: | ---: |",
    ]
    stock = {curve.seed: _held_out(curve) for curve in curves if curve.label == curves[0].label}
    for label in dict.fromkeys(curve.label for curve in curves):
        runs = [curve for curve in curves if curve.label == label]
        away = max(abs(_held_out(curve) - stock[curve.seed]) for curve in runs)
        losses = [statistics.mean(curve.losses[-LAST:]) for curve in runs]
        lines.append(f"| {label} | {_spread(losses)} | {_spread([_held_out(curve) for curve in runs])} | {away:.4f} |")
    lines += ["", f"![Losses of training and of held-out people, by step]({PICTURE})"]
    return "\n".join(lines) + "\n"


def _held_out(curve: Curve) -> float:
    return curve.held_out[max(curve.held_out)] if curve.held_out else float("nan")


def _spread(values: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{spread}"


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Draw the losses of every way as SVG: a line for each seed; the same runs give the same bytes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(curve.label for curve in curves))
    with mpl.rc_context({"svg.hashsalt": "learning", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(9, 3.2), layout="constrained")
        training, held_out = figure.subplots(1, 2)
        for curve in curves:
            colour, label = f"C{labels.index(curve.label)}", curve.label if not curve.seed else None
            training.plot(range(1, 1 + len(curve.losses)), curve.losses, color=colour, lw=0.6, alpha=0.7)
            held_out.plot(list(curve.held_out), list(curve.held_out.values()), color=colour, lw=0.9, label=label)
        training.set(title="loss of each step", xlabel="step", yscale="log")
        held_out.set(title="loss of held-out people", xlabel="step", yscale="log")
        held_out.legend()
        figure.savefig(path, metadata={"Date": None})


def write(curves: Sequence[Curve], folder: Path, date: str, versions: str) -> None:
    """Write the table and the picture into `folder`, and print the table."""
    text = markdown(curves, date, versions)
    (folder / "curves.md").write_text(text, encoding="utf-8")
    draw(curves, folder / PICTURE)
    print(f"\n{text}")


def renew(curves: Sequence[Curve], docs: Path, date: str, versions: str) -> None:
    """Renew the measured part of docs/details/learning.md and its picture."""
    page = docs / "learning.md"
    text = with_measured(page.read_text(encoding="utf-8"), MARKS, markdown(curves, date, versions))
    page.write_text(text, encoding="utf-8")
    draw(curves, docs / PICTURE)

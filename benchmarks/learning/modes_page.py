"""The rows of `make learn-int4` as a table and a picture, and their place in docs/details/quantisation.md."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from learning.measured import with_measured

if TYPE_CHECKING:
    from learning.modes import Row

PICTURE: Final = "int4-modes.svg"
MARKS: Final = ("<!-- measured by make learn-int4 -->\n", "<!-- end of what make learn-int4 measures -->\n")
_COLOURS: Final = {"bf16": "#4878a8", "int4": "#d08030", "merged": "#5a9a5a"}


def markdown(rows: Sequence[Row], date: str, seed: int) -> str:
    """Return the table, and how it was measured."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "trl"))
    lines = [
        f"Measured {date} by `make learn-int4`, seed {seed}",
        f"({versions}).",
        "",
        "| trained, and served                     | loss  | tokens first | equal answers | calls   | decode  |",
        "| --------------------------------------- | ----: | -----------: | ------------: | ------: | ------: |",
        *(
            f"| {row.label} | {row.loss:.3f} | {row.token_accuracy:.1f} % | {row.equal:.1f} % | {_gap(row.calls)} "
            f"| {_gap(row.drift)} |"
            for row in rows
        ),
        "",
        f"![Loss and shares of each way to train and serve]({PICTURE})",
    ]
    return "\n".join(lines) + "\n"


def _gap(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw loss, shares and the difference from the trainer as SVG; the same rows give the same bytes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    panels = (
        ("held-out loss per token", [row.loss for row in rows], "%.3f"),
        ("reference tokens that rank first, %", [row.token_accuracy for row in rows], "%.1f"),
        ("mean |dlogp|, trainer to decoding", [row.drift for row in rows], "%.1g"),
    )
    with mpl.rc_context({"svg.hashsalt": "learning", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(9, 0.9 + 0.32 * len(rows)), layout="constrained")
        for place, (axes, (title, values, form)) in enumerate(zip(figure.subplots(1, 3), panels, strict=True)):
            _bars(axes, rows, title, values, form, labelled=not place)
        figure.savefig(path, metadata={"Date": None})


def _bars(axes: Any, rows: Sequence[Row], title: str, values: Sequence[float], form: str, *, labelled: bool) -> None:
    bars = axes.barh(range(len(rows)), values, color=[_COLOURS[row.trained] for row in rows])
    axes.bar_label(bars, fmt=form, padding=2)
    axes.set(title=title, xlim=(0, 1.25 * max(values)))
    axes.set_yticks(range(len(rows)), [row.label for row in rows] if labelled else [""] * len(rows))
    axes.invert_yaxis()


def write(rows: Sequence[Row], folder: Path, date: str, seed: int) -> None:
    """Write the table and the picture into `folder`, and print the table."""
    text = markdown(rows, date, seed)
    (folder / "modes.md").write_text(text, encoding="utf-8")
    draw(rows, folder / PICTURE)
    print(f"\n{text}")


def renew(rows: Sequence[Row], docs: Path, date: str, seed: int) -> None:
    """Renew the measured part of docs/details/quantisation.md and its picture."""
    page = docs / "quantisation.md"
    text = with_measured(page.read_text(encoding="utf-8"), MARKS, markdown(rows, date, seed))
    page.write_text(text, encoding="utf-8")
    draw(rows, docs / PICTURE)

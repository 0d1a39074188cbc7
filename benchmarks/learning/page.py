"""`Results` as a page of Markdown and a picture: losses while tuning, and each metric before and after."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from learning.results import Results, Run, Scores
from learning.world import Task

METRICS: dict[Task, tuple[str, ...]] = {
    "style": ("bleu-1", "bleu-2", "bleu-3", "bleu-4", "rouge-1", "rouge-2", "rouge-l", "accuracy"),
    "choice": ("accuracy",),
}
TITLES: dict[Task, str] = {"style": "Style", "choice": "Multiple choice"}
_LABELS = {"moe-lora": "attention", "moe-experts-lora": "attention and experts"}
_COLOURS = ("#4878a8", "#d08030", "#5a9a5a", "#a05a98")
PICTURE = "learning.svg"


def label(run: Run) -> str:
    return f"{_LABELS[run.rules]}, rank {run.rank}"


def table(runs: Sequence[Run]) -> str:
    """Return one task's runs under their base, in percent, each with the difference to the base in brackets."""
    names = METRICS[runs[0].task]
    head = ["LoRA on", "trainable", *(_title(name) for name in names)]
    rows = [["none: the base", "0", *_cells(runs[0].base, None, names)]]
    rows += [[label(run), f"{run.trainable:,}", *_cells(run.tuned, run.base, names)] for run in runs]
    lines = [head, ["---"] * 2 + ["--:"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _title(metric: str) -> str:
    return metric.capitalize() if metric.isalpha() else metric.upper()


def _cells(scores: Scores, base: Scores | None, names: Sequence[str]) -> list[str]:
    if base is None:
        return [f"{scores[name]:.1f}" for name in names]
    return [f"**{scores[name]:.1f}** ({scores[name] - base[name]:+.1f})" for name in names]


def markdown(results: Results) -> str:
    """Return the measured part of the page: both tables, the answers side by side, and the conditions."""
    parts = [
        _how(results),
        *(part for task in TITLES if results.of(task) for part in (f"### {TITLES[task]}", table(results.of(task)))),
        f"![Losses while tuning, and the metrics before and after]({PICTURE})",
        "### What it says",
        *(
            f"* *{e.question}*<br>before: {e.before or '(nothing)'}<br>after: {e.after}<br>reference: {e.wanted}"
            for e in results.examples
        ),
    ]
    return "\n\n".join(parts).replace("\n\n* ", "\n* ") + "\n"


def _how(results: Results) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    return (
        f"Measured {results.date} by `make learn` in {results.seconds:.0f} s of processor time, of which "
        f"{results.pretrain_seconds:.0f} s are pre-training ({versions}), seed {results.seed}, a model of "
        f"{results.parameters:,} parameters. In percent; in brackets the change to the base."
    )


def draw(results: Results, path: Path) -> None:
    """Two panels for each task as SVG; the same results give the same bytes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    tasks = [task for task in TITLES if results.of(task)]
    with mpl.rc_context({"svg.hashsalt": "learning", "font.size": 8}):
        figure = Figure(figsize=(9, 2.6 * len(tasks)), layout="constrained")
        panels = figure.subplots(len(tasks), 2, squeeze=False, width_ratios=(1, 1.6))
        for (losses, bars), task in zip(panels, tasks, strict=True):
            _draw_losses(losses, results.of(task), task)
            _draw_bars(bars, results.of(task), task)
        figure.savefig(path, metadata={"Date": None})


def _draw_losses(axes: Any, runs: Sequence[Run], task: Task) -> None:
    for run, colour in zip(runs, _COLOURS, strict=False):
        axes.plot(range(1, len(run.losses) + 1), _smoothed(run.losses), color=colour, label=label(run), lw=1)
    axes.set(title=f"{task}: loss while tuning", xlabel="step", ylim=(0, None))
    axes.legend(frameon=False)


def _draw_bars(axes: Any, runs: Sequence[Run], task: Task) -> None:
    """Per metric the base in grey, then every run."""
    names = METRICS[task]
    rows = [("base", runs[0].base, "#b0b0b0"), *((label(r), r.tuned, c) for r, c in zip(runs, _COLOURS, strict=False))]
    width = 0.85 / len(rows)
    for place, (title, scores, colour) in enumerate(rows):
        left = [column + (place - (len(rows) - 1) / 2) * width for column in range(len(names))]
        bars = axes.bar(left, [scores[name] for name in names], width, color=colour, label=title)
        if len(names) == 1:
            axes.bar_label(bars, fmt="%.0f")
    axes.set(title=f"{task}: held-out items, percent", ylim=(0, 108), xticks=range(len(names)))
    axes.set_xticklabels([_title(name) for name in names], fontsize=7)
    if len(names) == 1:
        axes.set_xlim(-1, 1)
        axes.axhline(25, color="black", lw=0.7, ls=":", label="chance")
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def _smoothed(losses: Sequence[float], window: int = 5) -> list[float]:
    """Return the mean of the last `window` losses."""
    starts = (max(0, i + 1 - window) for i in range(len(losses)))
    return [sum(losses[start : i + 1]) / (i + 1 - start) for i, start in enumerate(starts)]

"""The report of a training run as `report.html`, one page without external files, and its loss as `loss.svg`.

In: the run's report, its data and settings. Out: two files in the run's folder. Everything shown is escaped.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ktc import resources
from ktc.files import write_file
from ktc.training.phases import PHASES
from ktc.training.run_report import Logged, RunReport
from ktc.tune.settings import TrainSettings
from ktc.tune.tokenised import DataSummary

if TYPE_CHECKING:
    from ktc.tune.types import PreparedData

PAGE, PLOT = "report.html", "loss.svg"
_WIDEST = 20.0  # of a bar, in characters
_GIB = 2**30


def write_page(folder: Path, report: RunReport, data: PreparedData, settings: TrainSettings) -> None:
    """Write both files. Without matplotlib the page has no plot, and there is no second file."""
    plot = loss_plot(report.history)
    if plot:
        write_file(folder / PLOT, plot)
    write_file(folder / PAGE, page(report, data, settings, plot))


def page(report: RunReport, data: PreparedData, settings: TrainSettings, plot: str = "") -> str:
    """Return the page as HTML. `plot` is an SVG document that it embeds."""
    loader = FileSystemLoader(resources.templates() / "report")
    environment = Environment(loader=loader, undefined=StrictUndefined, autoescape=True, trim_blocks=True)
    template = environment.get_template("page.html.j2")
    return template.render(
        title=f"LoRA of {Path(report.model).name}",
        facts=list(facts(report)),
        plot=Markup(plot[plot.index("<svg") :]) if plot else "",
        phases=list(_phases(report)),
        experts=list(_experts(report)),
        datasets=[_data("Training data", data.train.summary)]
        + ([_data("Held-out data", data.held_out.summary)] if data.held_out else []),
        settings=settings.to_yaml(),
    )


def facts(report: RunReport) -> Iterator[tuple[str, str]]:
    """Yield the results of the run as names and values."""
    yield "model", report.model
    stopped = "" if report.finished else ", stopped before its end"
    yield "steps", f"{report.steps} ({report.epochs:.2f} epochs) in {report.seconds:.1f} s{stopped}"
    losses = [each.loss for each in report.history if each.loss is not None]
    if losses:
        yield "loss", f"{losses[0]:.4f} at first, {losses[-1]:.4f} at last"
    held_out = [each.eval_loss for each in report.history if each.eval_loss is not None]
    if held_out:
        yield "loss of held-out data", f"{held_out[0]:.4f} at first, {min(held_out):.4f} at best"
    if report.speed:
        of = report.speed
        yield "step time", f"{of.step_time:.3f} s"
        yield "tokens per step", f"{of.tokens_per_step:,.0f} ({of.padded_per_step:,.0f} with padding)"
        yield "token/s", f"{of.tokens_per_second:,.1f}"
        nominal = f"{report.accumulation} x {report.micro_batch} x {report.length} on {report.processes} process(es)"
        yield "token/s, nominal", f"{of.nominal_tokens_per_second:,.1f} (counted as {nominal})"
    yield "trainable parameters", f"{report.trainable_parameters:,} of {report.total_parameters:,}"
    for gpu in report.gpus:
        yield f"peak memory of {gpu.device}", f"{gpu.allocated / _GIB:.2f} GiB, {gpu.reserved / _GIB:.2f} GiB reserved"
    yield "peak memory of the host", f"{report.host_peak_rss / _GIB:.2f} GiB"
    if report.stacking:
        yield "micro-batches", report.stacking
    yield "machine", "; ".join(f"{name} {value}" for name, value in report.machine.items() if value)
    yield "versions", ", ".join(f"{name} {version}" for name, version in report.versions.items())


def _phases(report: RunReport) -> Iterator[dict[str, object]]:
    whole = sum(report.phases.values()) or 1.0
    for phase, seconds in report.phases.items():
        if seconds:
            share = seconds / whole
            width = round(_WIDEST * share, 2)
            yield {"words": PHASES[phase], "seconds": f"{seconds:.4f} s", "share": f"{share:.1%}", "width": width}


def _experts(report: RunReport) -> Iterator[dict[str, object]]:
    for phase, of in report.experts.items():
        cells = (
            f"{of.seconds:.4f}", f"{of.token_layers:,.0f}", f"{of.flops / 1e12:.4f}", f"{of.lora_flops / 1e12:.4f}",
            f"{of.tflops:.3f}",
        )  # fmt: skip
        yield {"name": PHASES[phase], "cells": cells}


def _data(title: str, data: DataSummary) -> dict[str, object]:
    most = max(each.rows for each in data.lengths) or 1
    bins = [
        {"words": f"{each.low} to {each.high}", "rows": each.rows, "width": round(_WIDEST * each.rows / most, 2)}
        for each in data.lengths
    ]
    return {"title": title, "facts": list(data_facts(data)), "bins": bins, "first": data.first}


def data_facts(data: DataSummary) -> Iterator[tuple[str, str]]:
    """Yield the summary of the data as names and values."""
    yield "file", data.file
    yield "format", f"{data.format} ({'found' if data.detected else 'as asked'}), template: {data.template}"
    yield "rows", f"{data.rows:,}"
    yield "tokens", f"{data.tokens:,}, {data.learned:,} of them learned"
    yield "lengths", f"{data.shortest} to {data.longest}, median {data.median:g}; at most {data.limit}"
    if data.cut:
        yield "cut", f"{data.cut:,} rows were longer and are cut; {data.dropped:,} of all had no answer left"


def loss_plot(history: Sequence[Logged]) -> str:
    """Return the losses over the steps as an SVG document, empty without losses or without matplotlib."""
    if not history or importlib.util.find_spec("matplotlib") is None:
        return ""
    matplotlib: Any = importlib.import_module("matplotlib")
    figures: Any = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(8, 3.6))
    axes = figure.add_subplot()
    for name, label in (("loss", "training"), ("eval_loss", "held-out")):
        points = [(each.step, value) for each in history if (value := getattr(each, name)) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="." if len(points) < 60 else "", linewidth=1.2, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(True, linewidth=0.3, alpha=0.5)
    axes.legend(frameon=False)
    written = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ktc"}):
        figure.savefig(written, format="svg", bbox_inches="tight", metadata={"Date": None})
    return written.getvalue()

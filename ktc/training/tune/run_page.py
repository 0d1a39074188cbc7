"""The report of a training run as `report.html`, one page without external files, and its pictures.

In: the run's report, its data and settings, and the timeline of a traced step. Out: files in the run's folder.
Everything shown is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ktc.foundation import resources
from ktc.foundation.environment import small_model
from ktc.foundation.files import write_file
from ktc.training.trainers.phases import PHASES
from ktc.training.trainers.run_report import RunReport
from ktc.training.trainers.step_trace import Timeline
from ktc.training.tune.plots import loss_plot, timeline_plot
from ktc.training.tune.settings import TrainSettings
from ktc.training.tune.tokenised import DataSummary

if TYPE_CHECKING:
    from ktc.training.tune.sample_answer import SampleAnswer
    from ktc.training.tune.types import PreparedData

PAGE, PLOT, TIMELINE = "report.html", "loss.svg", "timeline.svg"
_WIDEST = 20.0  # of a bar, in characters
_GIB = 2**30


def write_page(
    folder: Path, report: RunReport, data: PreparedData, settings: TrainSettings, timeline: Timeline | None = None,
    sample: SampleAnswer | None = None,
) -> None:  # fmt: skip
    """Write the files. Without matplotlib the page has no pictures, and there is no other file."""
    plots = {PLOT: loss_plot(report.history), TIMELINE: timeline_plot(timeline)}
    for name, plot in plots.items():
        if plot:
            write_file(folder / name, plot)
    write_file(folder / PAGE, page(report, data, settings, *plots.values(), sample=sample))


def page(
    report: RunReport, data: PreparedData, settings: TrainSettings, plot: str = "", timeline: str = "",
    sample: SampleAnswer | None = None,
) -> str:  # fmt: skip
    """Return the page as HTML. `plot` and `timeline` are SVG documents that it embeds."""
    loader = FileSystemLoader(resources.templates() / "report")
    environment = Environment(loader=loader, undefined=StrictUndefined, autoescape=True, trim_blocks=True)
    template = environment.get_template("page.html.j2")
    return template.render(
        title=f"LoRA of {small_model(Path(report.model)) or Path(report.model).name}",
        facts=list(facts(report)),
        sample=sample,
        plot=_embedded(plot),
        timeline=_embedded(timeline),
        phases=list(_phases(report)),
        experts=list(_experts(report)),
        datasets=[_data("Training data", data.train.summary)]
        + ([_data("Held-out data", data.held_out.summary)] if data.held_out else []),
        settings=settings.to_yaml(),
    )


def _embedded(svg: str) -> Markup | str:
    return Markup(svg[svg.index("<svg") :]) if svg else ""


def facts(report: RunReport) -> Iterator[tuple[str, str]]:
    """Yield the results of the run as names and values."""
    yield "model", report.model
    stopped = "" if report.finished else ", stopped before its end"
    yield "steps", f"{report.steps} ({report.epochs:.2f} epochs) in {report.seconds:.1f} s{stopped}"
    losses = [line.loss for line in report.history if line.loss is not None]
    if losses:
        yield "loss", f"{losses[0]:.4f} at first, {losses[-1]:.4f} at last"
    margins = [line.reward_margin for line in report.history if line.reward_margin is not None]
    if margins:
        yield "margin of the better answers", f"{margins[0]:.4f} at first, {margins[-1]:.4f} at last"
    held_out = [line.eval_loss for line in report.history if line.eval_loss is not None]
    if held_out:
        yield "loss of held-out data", f"{held_out[0]:.4f} at first, {min(held_out):.4f} at best"
    if report.speed:
        speed = report.speed
        yield "step time", f"{speed.step_time:.3f} s"
        yield "tokens per step", f"{speed.tokens_per_step:,.0f} ({speed.padded_per_step:,.0f} with padding)"
        yield "token/s", f"{speed.tokens_per_second:,.1f}"
        nominal = f"{report.accumulation} x {report.micro_batch} x {report.length}"
        nominal += f" on {report.processes} processes" if report.processes > 1 else ""
        yield "token/s, nominal", f"{speed.nominal_tokens_per_second:,.1f} (as if each step had {nominal} tokens)"
    yield "trainable parameters", f"{report.trainable_parameters:,} of {report.total_parameters:,}"
    for gpu in report.gpus:
        yield f"peak memory of {gpu.device}", f"{gpu.allocated / _GIB:.2f} GiB, {gpu.reserved / _GIB:.2f} GiB reserved"
    yield "peak memory of the host", f"{report.host_peak_rss / _GIB:.2f} GiB"
    if report.stacking:
        yield "micro-batches", report.stacking
    for stream in report.streams:
        yield f"weights sent to {stream.device}", str(stream)
        if stream.dropped_per_step:
            yield f"sent for nothing to {stream.device}", f"{stream.dropped_per_step / 1e9:.2f} GB a step"
    if report.offload:
        yield "routed experts", report.offload
    if report.expert_adapters:
        yield "their adapters", report.expert_adapters.removeprefix("adapters of experts ")
    if report.linears:
        yield "linear layers on the CPU", report.linears
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
    for phase, speed in report.experts.items():
        cells = (
            f"{speed.seconds:.4f}", f"{speed.token_layers:,.0f}", f"{speed.flops / 1e12:.4f}",
            f"{speed.lora_flops / 1e12:.4f}", f"{speed.tflops:.3f}",
        )  # fmt: skip
        yield {"name": PHASES[phase], "cells": cells}


def _data(title: str, data: DataSummary) -> dict[str, object]:
    most = max(bin_.rows for bin_ in data.lengths) or 1
    bins = [
        {"words": f"{bin_.low} to {bin_.high}", "rows": bin_.rows, "width": round(_WIDEST * bin_.rows / most, 2)}
        for bin_ in data.lengths
        if bin_.rows
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

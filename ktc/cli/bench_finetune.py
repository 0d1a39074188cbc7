"""`ktc bench finetune`: measure optimizer steps of LoRA at a model's real sizes, beside stock Hugging Face and PEFT.

In: the options. Out: progress on stderr, the table on stdout, and the files of `--output`, `--trace` and `--plot`.
Invalid input and a model that does not fit are refused before the long parts.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktc.cli.bench_files import require_distinct, require_writable
from ktc.cli.compiling import settings_of
from ktc.cli.options import ConfigModel, ExpertsFormat, ResultsFile, RuleName, Settings
from ktc.cli.session import Session
from ktc.cli.session_options import in_session

if TYPE_CHECKING:
    from ktc.tools.bench.watch import Watch


@in_session()
def finetune_command(
    session: Session,
    config: ConfigModel,
    rule: RuleName = "moe-lora",
    settings: Settings = None,
    weight_format: ExpertsFormat = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Make random weights in memory instead of reading a checkpoint.")
    ] = False,
    layers: Annotated[
        int | None, typer.Option("--layers", min=1, help="Only the first N layers, with random weights.")
    ] = None,
    length: Annotated[int, typer.Option("--length", min=2, help="Tokens per sequence.")] = 512,
    accumulation: Annotated[int, typer.Option("--accumulation", min=1, help="Sequences per optimizer step.")] = 16,
    steps: Annotated[int, typer.Option("--steps", min=2, help="Optimizer steps. The first is not counted.")] = 4,
    experts: Annotated[
        str,
        typer.Option(
            "--experts",
            metavar="PLACE,...",
            help="Where ktc multiplies experts: gpu (streamed to it), cpu; reference: all in fp32 as plain PyTorch. "
            "Default: the GPU if there is one.",
        ),
    ] = "",
    impls: Annotated[
        str,
        typer.Option("--impl", metavar="NAME,...", help="ktc, and hf: stock Hugging Face and PEFT, all on one GPU."),
    ] = "ktc",
    output: ResultsFile = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE.json",
            help="Write the timeline of one step of ktc as a Chrome trace; of several places FILE-PLACE.json.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw loss and gradient norm of every step: a .png or .svg file."),
    ] = None,
) -> None:
    """Run optimizer steps of LoRA on a model of real sizes, and show token/s, memory and the phases of a step."""
    session.require_versions()
    import torch

    from ktc.cli.finetune_table import tables
    from ktc.tools.bench.finetune.request import Typed, parse
    from ktc.tools.bench.picture import require_drawable

    typed = Typed(
        model=config,
        rule=rule,
        settings=settings_of(settings),
        weight_format=weight_format,
        random_weights=random_weights,
        layers=layers,
        length=length,
        accumulation=accumulation,
        steps=steps,
        experts=experts,
        impls=impls,
        trace=trace,
        plot=plot,
    )
    request = parse(typed, torch.cuda.device_count())
    if plot is not None:
        require_drawable(plot, "a plot")
    traces = {f"--trace ({place})": file for place in request.experts if (file := request.trace_of(place))}
    require_distinct({"--output": output, "--plot": plot, **traces})
    for file in (output, *traces.values()):
        if file is not None:
            require_writable(file)
    session.go_on()
    from ktc.tools.bench.finetune.plot import draw
    from ktc.tools.bench.finetune.run import run

    with watching(session) as watch:
        report = run(request, watch)
    session.result(report.to_json())
    session.show(tables(report))
    if output is not None:
        session.emit(json.dumps(report.to_json(), indent=2), output)
    if plot is not None:
        draw(report, plot)
    for file in (*traces.values(), *([plot] if plot else [])):
        session.console.print(f"wrote {file}")
    session.next("ktc", "check", rule, config)


@contextmanager
def watching(session: Session) -> Generator[Watch]:
    """Show a line for each finished stage, part and step, and on a terminal a bar for the running part."""
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from ktc.cli.report import StageReport
    from ktc.tools.bench.watch import Watch

    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=session.console, transient=True) as bar:
        task = bar.add_task("compiling", total=None)

        def progress(what: str, done: float, total: float) -> None:
            session.go_on()
            bar.update(task, description=what, completed=done, total=total)

        def told(what: str) -> None:
            session.note(what)
            bar.console.print(f"  {what}", markup=False, soft_wrap=True)

        yield Watch(StageReport(session, bar.console).observe, progress, told)

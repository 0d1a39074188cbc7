"""`ktc bench moe`: measure the experts of a layer beside their peers; a table, JSON and a roofline.

In: the options. Out: progress on stderr, the table on stdout, and the files of `--output` and `--plot`. Invalid input
is refused before the first measurement.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktc.cli.session import Session
from ktc.cli.session_options import in_session
from ktc.diagnostics import Diagnostic, InputRefused

if TYPE_CHECKING:
    from rich.progress import Progress

app = typer.Typer(help="Measure ktc beside its peers.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure ktc beside its peers."""


@app.command("moe")
@in_session()
def moe_command(
    session: Session,
    shape: Annotated[
        str, typer.Option("--shape", help="The sizes of the layer: v2lite, qwen3_30b, v3, or custom.")
    ] = "v2lite",
    hidden: Annotated[int | None, typer.Option("--hidden", min=1, help="Hidden size of a custom shape.")] = None,
    intermediate: Annotated[
        int | None, typer.Option("--intermediate", min=1, help="Intermediate size of a custom shape.")
    ] = None,
    experts: Annotated[
        int | None,
        typer.Option("--experts", min=1, help="Number of experts; a named shape may have fewer than its own."),
    ] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, help="Experts per token of a custom shape.")] = None,
    tokens: Annotated[str, typer.Option("--tokens", metavar="N,...", help="Numbers of tokens per call.")] = "1,32,512",
    passes: Annotated[
        str, typer.Option("--pass", metavar="PASS,...", help="forward, train (forward and backward), or both.")
    ] = "forward",
    impls: Annotated[
        str,
        typer.Option(
            "--impl",
            metavar="NAME,...",
            help="Implementations: ktc_FORMAT, hf_eager, hf_grouped_mm, hf_batched_mm, compile, onednn_dense, "
            "kt_kernel, kt_kernel_int8, kt_kernel_int4; or the groups ktc, hf, kt, all.",
        ),
    ] = "",
    lora_ranks: Annotated[
        str, typer.Option("--lora-rank", metavar="R,...", help="LoRA ranks on the experts; 0: without LoRA.")
    ] = "0",
    threads: Annotated[
        int, typer.Option("--threads", min=1, help="CPU threads. One thread measures CPU time, more measure wall time.")
    ] = 1,
    rounds: Annotated[
        int, typer.Option("--rounds", min=0, help="Measured rounds; the median is reported. 0 chooses by the cost.")
    ] = 0,
    isas: Annotated[
        str,
        typer.Option("--isa", metavar="ISA,...", help="Instruction sets of ktc's kernels. Default: the best."),
    ] = "",
    kt_python: Annotated[
        Path | None,
        typer.Option("--kt-python", metavar="PATH", help="The Python interpreter of kt-kernel's environment."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.json", help="Write the results as JSON to this file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw a roofline: a .png or .svg file.")
    ] = None,
) -> None:
    """Measure the routed experts of one layer, ktc's and others', in one process and in interleaved rounds."""
    session.require_versions()
    from ktc.bench.options import Typed, parse
    from ktc.bench.plot import draw, require_drawable
    from ktc.bench.run import run
    from ktc.cli.bench_table import tables

    sizes = (hidden, intermediate, experts, top_k)
    typed = Typed(shape, *sizes, tokens, passes, impls, lora_ranks, isas, threads, rounds, kt_python)
    request = parse(typed)
    if plot is not None:
        require_drawable(plot)
    if output is not None:
        _require_writable(output, plot)
    session.go_on()
    with _bar(session) as bar:
        task = bar.add_task("", total=None)

        def progress(done: int, total: int, now: str) -> None:
            session.go_on()
            bar.update(task, completed=done, total=total or None, description=now)

        report = run(request, progress)
    session.note(f"measured {json.dumps(asdict(request), default=str)}")
    session.result(report.to_json())
    session.show(tables(report))
    if output is not None:
        session.emit(json.dumps(report.to_json(), indent=2), output)
    if plot is not None:
        draw(report, plot)
        session.console.print(f"wrote {plot}")


def _require_writable(output: Path, plot: Path | None) -> None:
    """Check before the run that `--output` is writable.

    Raises:
        InputRefused: `output` is not writable (U003), or it is also the file of `--plot` (U030).
    """
    target = output.absolute()
    if plot is not None and target == plot.absolute():
        raise InputRefused(Diagnostic("U030", f"`--output` and `--plot` are both `{output}`", hint="name two files"))
    existing = next(folder for folder in (target, *target.parents) if folder.exists())
    if target.is_dir():
        reason = "it is a folder"
    elif existing != target and not existing.is_dir():
        reason = f"`{existing}` is not a folder"
    elif not os.access(existing, os.W_OK):
        reason = "permission denied"
    else:
        return
    raise InputRefused(Diagnostic("U003", f"cannot write `{output}`: {reason}"))


def _bar(session: Session) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns: Sequence[Any] = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=session.console, transient=True)

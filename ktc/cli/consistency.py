"""`ktc consistency`: log-probabilities of the same tokens where a model trains and where it serves.

In: the options. Out: tables, with `-o` the values as JSON, with `--plot` a picture, and the exit code 1 where a bound
is broken.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Annotated, Literal

import typer

from ktc.cli.early_checks import require_adapter, require_compiled, require_readable, require_writable
from ktc.cli.following import after_compiling
from ktc.cli.options import CompareImages, ReportFile, Seed, Trust, Weights
from ktc.cli.session import Session
from ktc.cli.session_options import in_session
from ktc.diagnostics import Diagnostic, InputRefused

Against = Literal["trainer", "stock"]
Precision = Literal["bf16", "fp32"]
Stack = Literal["auto", "on", "off"]
Attention = Literal["as compiled", "eager", "sdpa"]


@in_session()
def command(
    session: Session,
    outs: Annotated[
        list[str],
        typer.Argument(metavar="[NAME=]OUT...", help="Compiled models that train. Several are compared in all pairs."),
    ],
    serve: Annotated[
        list[str] | None,
        typer.Option("--serve", metavar="[NAME=]OUT", help="A compiled model that serves. Default: those that train."),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", metavar="[NAME=]A", help="The adapter of the training: of all models, or of one."),
    ] = None,
    merged: Annotated[
        bool, typer.Option("--merged", help="Models that serve hold the adapter already, and get none.")
    ] = False,
    against: Annotated[
        Against,
        typer.Option("--against", help="Compare with the trainer, or with stock transformers on the same weights."),
    ] = "trainer",
    text: Annotated[
        Path | None, typer.Option("--text", metavar="FILE", help="Use this text's tokens. Default: random tokens.")
    ] = None,
    image: CompareImages = None,
    sequences: Annotated[int, typer.Option("--sequences", min=1, max=4096, help="Number of sequences.")] = 4,
    length: Annotated[int, typer.Option("--tokens", min=2, max=1 << 17, help="Tokens of a sequence.")] = 64,
    prompt: Annotated[int, typer.Option("--prompt", min=1, help="Tokens before decoding begins.")] = 16,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Sequences that are decoded together.")] = 1,
    precision: Annotated[
        Precision, typer.Option("--precision", help="bf16: a bf16 model trains under autocast, as by `ktc train`.")
    ] = "bf16",
    stack: Annotated[Stack, typer.Option("--stack", help="Whether the trainer stacks micro-batches.")] = "auto",
    attention: Annotated[
        Attention, typer.Option("--attention", help="The attention of transformers on both sides.")
    ] = "as compiled",
    max_mean: Annotated[
        float | None,
        typer.Option("--max-mean", min=0.0, help="Exit with 1 if a matched cell's mean of decoding is above this."),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Exit with 1 if a bit of a matched cell's calls differs.")
    ] = False,
    output: ReportFile = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="F.svg", help="Also draw the report.")] = None,
    seed: Seed = 0,
    weights: Weights = None,
    trust: Trust = False,
) -> None:
    """Compare the trainer's log-probabilities with those of serving, over the same tokens."""
    adapters = adapter or []
    if adapters and against == "stock":
        message = "`--adapter` has no meaning for `--against stock`"
        raise InputRefused(Diagnostic("V810", message, hint="stock is compared without an adapter: leave it out"))
    from ktc.inference.consistency.request import Request, models

    trained = models(outs, adapters)
    served = models(serve) if serve else trained
    request = Request(
        trained, served, against=against, merged=merged, text=text, images=tuple(image or ()), sequences=sequences,
        length=length, prompt=prompt, batch_size=batch_size, precision=precision, stack=stack, attention=attention,
        seed=seed, weights=weights, trusted=trust,
    )  # fmt: skip
    require_compiled(*(one.folder for one in {*trained, *served}))
    require_readable(text)
    for one in trained:
        require_adapter(one.adapter)
    require_writable(output)
    session.require_versions()
    from ktc.cli.bars import calls_bar
    from ktc.cli.consistency_table import modes_table, paths_table, verdict
    from ktc.inference.consistency.picture import draw, require_drawable
    from ktc.inference.consistency.run import measure

    if plot is not None:
        require_drawable()
    session.raise_if_interrupted()
    with calls_bar(session) as observe, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of names that transformers and PEFT use themselves
        report = measure(request, observe)
    faults = report.faults(max_mean, exact)
    session.result({"consistency": report.to_json(), "faults": list(faults)})
    if len(report.cells) > 1:
        session.show(modes_table(report))
    session.show(paths_table(report))
    session.show(verdict(report, faults))
    if output is not None:
        session.emit(json.dumps(report.to_json(), indent=1), output)
    if plot is not None:
        session.emit(draw(report), plot)
    if faults:
        session.exit_code = 1
    session.next(*after_compiling(Path(outs[0].rpartition("=")[2]), weights=weights, trust=trust))

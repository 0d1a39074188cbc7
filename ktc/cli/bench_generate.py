"""`ktc bench generate`: measure the steps of `generate` at a model's real sizes, beside eager code and Hugging Face.

In: the options. Out: progress on stderr, the table on stdout, and the file of `--output`. Invalid input is refused
before anything is compiled.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ktc.cli.bench_files import require_writable
from ktc.cli.bench_finetune import watching
from ktc.cli.compiling import settings_of
from ktc.cli.options import ConfigModel, ExpertsFormat, ResultsFile, RuleName, Settings
from ktc.cli.session import Session
from ktc.cli.session_options import in_session


@in_session()
def generate_command(
    session: Session,
    config: ConfigModel,
    rule: RuleName = "mla-inference",
    settings: Settings = None,
    weight_format: ExpertsFormat = None,
    layers: Annotated[int | None, typer.Option("--layers", min=1, help="Only the first N layers.")] = None,
    batches: Annotated[str, typer.Option("--batch", metavar="N,...", help="Numbers of sequences.")] = "1",
    contexts: Annotated[str, typer.Option("--context", metavar="N,...", help="Lengths of the prompts.")] = "64,4096",
    steps: Annotated[int, typer.Option("--steps", min=8, help="New tokens of each sequence.")] = 64,
    impls: Annotated[
        str,
        typer.Option(
            "--impl",
            metavar="NAME,...",
            help="ktc; eager: the same without CUDA graphs; hf: stock Hugging Face, all on one GPU.",
        ),
    ] = "ktc",
    output: ResultsFile = None,
) -> None:
    """Generate with a model of real sizes and random weights, and show token/s and the limit of the experts."""
    session.require_versions()
    from ktc.cli.generate_table import tables
    from ktc.tools.bench.generate.request import parse

    request = parse(
        model=config,
        rule=rule,
        settings=settings_of(settings),
        weight_format=weight_format,
        layers=layers,
        batches=batches,
        contexts=contexts,
        steps=steps,
        impls=impls,
    )
    if output is not None:
        require_writable(output)
    session.go_on()
    from ktc.tools.bench.generate.run import run

    with watching(session) as watch:
        report = run(request, watch)
    session.result(report.to_json())
    session.show(tables(report))
    if output is not None:
        session.emit(json.dumps(report.to_json(), indent=2), output)
    session.next("ktc", "check", rule, config)

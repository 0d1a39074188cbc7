"""`ktc prove`: a compiled model with its real weights beside the stock model, layer by layer.

In: the options. Out: a table, `OUT/fidelity.json`, the exit code 1 where a row is red.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ktc.cli.amounts import relative
from ktc.cli.early_checks import require_compiled, require_readable, require_writable
from ktc.cli.following import loading
from ktc.cli.options import CompareImages, CompiledModel, ReportFile, Seed, Trust, Weights
from ktc.cli.session import Session
from ktc.cli.session_options import in_session

if TYPE_CHECKING:
    from ktc.inference.prove.report import Report
    from ktc.inference.prove.run import Request


@in_session()
def prove_command(
    session: Session,
    out: CompiledModel,
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="Use this text's first tokens. Default: random tokens."),
    ] = None,
    image: CompareImages = None,
    count: Annotated[int, typer.Option("--tokens", min=1, max=1 << 17, help="Number of tokens.")] = 128,
    layers: Annotated[
        str | None, typer.Option("--layers", metavar="LIST", help="Compare only these layers: 0,3,10-12.")
    ] = None,
    carry: Annotated[
        bool, typer.Option("--carry", help="Also run both models as a whole, each layer on its own model's results.")
    ] = False,
    output: ReportFile = None,
    seed: Seed = 0,
    weights: Weights = None,
    trust: Trust = False,
) -> None:
    """Compare OUT with the stock model on its real weights, layer by layer in memory for about one layer."""
    require_compiled(out)
    require_readable(text)
    require_writable(output)
    session.require_versions()
    from ktc.inference.prove.run import Request

    report = prove(session, Request(out, text, tuple(image or ()), count, seed, layers, carry, weights, trust))
    if output is not None:
        session.emit(json.dumps(report.to_json(), indent=1), output)
    session.next("ktc", "pack", relative(out.absolute()), *loading(weights, trust))


def prove(session: Session, request: Request) -> Report:
    """Compare, record the report in the compiled folder, show it, and set the exit code."""
    from ktc.cli.prove_table import fidelity_table, verdict
    from ktc.foundation.progress import progress_bar
    from ktc.inference.prove.report import write_report
    from ktc.inference.prove.run import prove_model

    session.raise_if_interrupted()
    with progress_bar(f"proving {request.path.name}", session.quiet) as bar:
        report = prove_model(request, bar)
    path = write_report(request.path, report)
    session.result({"fidelity": report.to_json(), "red": report.red})
    session.show(fidelity_table(report, every=session.verbose))
    session.show(verdict(report, relative(path)))
    if report.red:
        session.exit_code = 1
    return report

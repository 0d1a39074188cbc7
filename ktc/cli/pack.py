"""`ktc pack` and `ktc verify`: the packed store of a compiled model made, and everything in its folder checked.

In: what the user named. Out: what a `Session` shows and prints. An interrupt leaves the layers that are finished, and
says how to go on.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from ktc.cli.options import CompiledModel, Json, LogFile, Quiet, Trust, Verbose, Weights
from ktc.cli.session import Session
from ktc.cli.tables import count, relative, size

if TYPE_CHECKING:
    from ktc.model.verify import Finding

_STYLES = {"good": "green", "stale": "yellow", "altered": "bold red", "missing": "bold red"}


def pack_command(
    out: CompiledModel,
    weights: Weights = None,
    force: Annotated[bool, typer.Option("--force", help="Pack every layer anew.")] = False,
    trust: Trust = False,
    as_json: Json = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    log_file: LogFile = None,
) -> None:
    """Keep OUT's experts packed on disk, for quick starts; finished layers stay, an interrupted run is gone on with."""
    with Session(as_json, verbose, quiet, log_file) as session:
        pack(session, out, weights, force, trust)


def verify_command(
    out: CompiledModel,
    weights: Weights = None,
    source: Annotated[
        bool, typer.Option("--source", help="Pack the checkpoint again in memory and compare every byte.")
    ] = False,
    trust: Trust = False,
    as_json: Json = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    log_file: LogFile = None,
) -> None:
    """Check every file of OUT against what it was written as, packed experts byte for byte."""
    with Session(as_json, verbose, quiet, log_file) as session:
        verify(session, out, weights, source, trust)


def pack(session: Session, out: Path, weights: Path | None = None, force: bool = False, trusted: bool = False) -> None:
    """Packs what the store of `out` lacks and tells what was done."""
    from ktc.model.pack import pack as pack_store
    from ktc.model.packed_store import renewal
    from ktc.model.progress import progress_bar

    started = time.perf_counter()
    session.go_on()
    try:
        with progress_bar(f"packing {out.name}", session.quiet) as bar:
            report = pack_store(out, weights=weights, force=force, trust_remote_code=trusted, progress=bar)
    except KeyboardInterrupt:
        session.console.print(f"what is packed is kept; `{renewal(relative(out.absolute()))}` goes on", markup=False)
        raise
    seconds = time.perf_counter() - started
    session.result({"packed": {**asdict(report), "folder": str(report.folder), "seconds": seconds}})
    done = f"{count(len(report.packed), 'layer')} packed in {seconds:.1f} s, {len(report.kept)} there already"
    session.show(Text(f"{relative(report.folder)} holds {size(report.size)}: {done}"))


def verify(session: Session, out: Path, weights: Path | None, source: bool, trusted: bool) -> None:
    """Shows every finding; the exit code is 1 if one is not good."""
    from ktc.model.progress import progress_bar
    from ktc.model.verify import verify as verify_model

    with progress_bar(f"verifying {out.name}", session.quiet) as bar:
        findings = verify_model(out, weights=weights, source=source, trust_remote_code=trusted, progress=bar)
    session.show(_table(findings))
    session.result({"out": str(out), "findings": [asdict(finding) for finding in findings]})
    session.exit_code = 0 if all(finding.state == "good" for finding in findings) else 1


def _table(findings: tuple[Finding, ...]) -> Table:
    table = Table("", "state", "found", box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for finding in findings:
        found = Text(finding.found)
        if finding.remedy:
            found.append(f"\n{finding.remedy}", style="dim")
        table.add_row(finding.name, Text(finding.state, style=_STYLES[finding.state]), found)
    table.columns[2].overflow = "fold"
    return table

"""`ktc merge`: the original with an adapter in its weights.

In: what the user named. Out: a bar on stderr, what was written, and with `--json` one object.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ktc.cli.options import Json, LogFile, Quiet, Verbose
from ktc.cli.session import Session
from ktc.cli.tables import size


def command(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="The original's checkpoint, or a compiled model of it (OUT).")
    ],
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="A folder that PEFT saved.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write: a checkpoint of its own.")],
    as_json: Json = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    log_file: LogFile = None,
) -> None:
    """Add ADAPTER to the weights of MODEL and write the checkpoint, tensor by tensor."""
    with Session(as_json, verbose, quiet, log_file) as session:
        session.require_versions()
        from ktc.adapters.merge import merge
        from ktc.model.progress import progress_bar

        with progress_bar(f"merging into {output.name}", quiet) as bar:
            done = merge(adapter, output, model, bar)
        session.result({**asdict(done), "path": str(done.path)})
        session.show(f"{done.path}: {done.changed} of {done.tensors} tensors changed, {size(done.bytes)}")

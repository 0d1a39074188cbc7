"""`ktc export`: write an adapter in another layout, and check that stock peft computes the same with it.

In: the options. Out: the output of a `Session`; exit code 1 if the check finds a difference.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ktc.cli.amounts import size
from ktc.cli.session import Session
from ktc.cli.session_options import in_session

if TYPE_CHECKING:
    from ktc.adapters.export import Exported
    from ktc.adapters.export_check import Checked

Layout = Literal["per-expert", "peft-fused", "peft-fused-018", "gguf"]
SourceAdapter = Annotated[
    Path, typer.Argument(metavar="ADAPTER", help="A folder that PEFT saved, or a GGUF adapter (with --model).")
]
OriginalModel = Annotated[
    Path | None,
    typer.Option("--model", metavar="FOLDER", help="The original model or a compiled model of it, if it was moved."),
]


@in_session()
def command(
    session: Session,
    adapter: SourceAdapter,
    layout: Annotated[
        Layout, typer.Option("--layout", help="The layout to write: per-expert loads in most tools, gguf in llama.cpp.")
    ] = "per-expert",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The folder or file to write. Default: ADAPTER's name and the layout."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Load the export with stock peft on a small twin and compare the logits.")
    ] = False,
    model: OriginalModel = None,
) -> None:
    """Write ADAPTER in the layout of another tool; the values do not change."""
    session.require_versions()
    from ktc.adapters.export import export

    done = export(adapter, layout, output, model)
    session.result({**asdict(done), "path": str(done.path)})
    session.show(_told(done))
    if check:
        from ktc.adapters.export_check import check as compare

        found = compare(adapter, done, model)
        session.result({"check": asdict(found)})
        session.show(_verdict(found))
        session.exit_code = 0 if found.passed else 1


def _told(done: Exported) -> str:
    lines = [
        f"{done.found} -> {done.layout}: {done.path}",
        f"{done.weights} adapted weights, {done.tensors} tensors, {size(done.bytes)}",
        *(f"note: {note}" for note in done.notes),
    ]
    return "\n".join(lines)


def _verdict(found: Checked) -> str:
    where = f"in stock peft {found.peft}" if found.peft else "read back"
    numbers = f"largest difference {found.difference:.2g}, the adapter's own effect {found.effect:.2g}"
    if found.passed:
        return f"the same {where}: relative error {found.relative:.1e} ({numbers}; {found.weights} weights)"
    return f"NOT the same: {found.found} (relative error {found.relative:.1e}; {numbers})"

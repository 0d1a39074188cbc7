"""`ktc census`: a small twin of every mixture-of-experts family of the installed transformers, compiled and proven.

In: the options. Out: the session that `benchmarks/census` has shown its table in. The census comes with the source and
not with the wheel. Refused: a place without it (U014).
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal, TypeAlias

import typer

from ktc.cli.options import Output
from ktc.cli.session import Session
from ktc.cli.session_options import in_session
from ktc.diagnostics import Diagnostic, InputRefused

Form: TypeAlias = Literal["text", "json", "markdown"]
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@in_session()
def census_command(
    session: Session,
    families: Annotated[
        list[str] | None,
        typer.Option("--family", metavar="NAME", help="Examine only this model type; repeatable. Default: all."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", min=1, help="Families at a time. Default: one per core, as memory allows."),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, help="Give up on a family after this time.")
    ] = 900,
    form: Annotated[Form, typer.Option("--format", help="The form of the table.")] = "text",
    output: Output = None,
) -> None:
    """Compile and prove a small twin of every mixture-of-experts family of the installed transformers."""
    session.require_versions()
    _census().run(session, families or (), jobs, timeout, form, output)


def _census() -> ModuleType:
    """Import the command from the source. Raises InputRefused (U014)."""
    if not (BENCHMARKS / "census").is_dir():
        message = "the census comes with the source of ktc and not with the installed package"
        hint = "clone the repository, `pip install -e .` in it, and call `ktc census` or `make census` there"
        raise InputRefused(Diagnostic("U014", message, hint=hint))
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module("census.command")

"""`ktc census`: compile a small twin of every mixture-of-experts family of the installed transformers."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import typer

from ktc.cli.options import Output
from ktc.cli.session import Session
from ktc.cli.session_options import in_session

Form: TypeAlias = Literal["text", "json", "markdown"]


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
    from ktc.cli.census_run import run

    run(session, families or (), jobs, timeout, form, output)

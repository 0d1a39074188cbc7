"""`ktc fmt`, `ktc explain` and `ktc import-kt-yaml`: for people who write rules.

In: what was typed. Out: rule files laid out, the meaning of a code, a rule file made of another tool's.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ktc.cli.options import Model, Output
from ktc.cli.session import Session
from ktc.cli.session_options import in_session


@in_session("as_json", "quiet")
def fmt_command(
    session: Session,
    files: Annotated[list[Path], typer.Argument(help="Rule files, or folders of them.")],
    check: Annotated[bool, typer.Option("--check", help="Change nothing; fail if a file is not laid out so.")] = False,
) -> None:
    """Lay rule files out canonically; comments stay where they are."""
    from ktc.dsl import formatter

    changed: list[str] = []
    session.result({"check": check, "changed": changed})
    for path in formatter.rule_files(files):
        if formatter.format_file(path, write=not check):
            changed.append(str(path))
            session.console.print(f"{path}: " + ("is not laid out canonically" if check else "rewritten"))
            session.exit_code = 1 if check else 0


@in_session("as_json")
def explain_command(
    session: Session,
    code: Annotated[str, typer.Argument(help="A code as messages show it, for example E042.")],
) -> None:
    """Say what the code of a message means, with a bad and a good example."""
    from ktc.explain import explain

    found = explain(code)
    session.result(asdict(found))
    if not session.as_json:
        session.emit(str(found), None)


@in_session()
def import_kt_yaml_command(
    session: Session,
    file: Annotated[Path, typer.Argument(help="A YAML file of KTransformers optimize rules.")],
    model: Model,
    output: Output = None,
) -> None:
    """Turn the optimize rules in FILE into a rule file for MODEL, verified module by module."""
    session.require_versions()
    from ktc.kt_yaml import import_kt_yaml

    found = import_kt_yaml(file, model)
    session.diagnose(found.warnings, found.sources)
    session.result(found.to_json())
    if output is not None or not session.as_json:
        session.emit(found.program, output)
    if not session.quiet:
        typer.echo(str(found.report), err=True, nl=False)

"""`ktc fmt`, `ktc explain` and `ktc import-kt-yaml`: for people who write rules.

In: what was typed. Out: rule files laid out, the meaning of a code, a rule file made of another tool's.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ktc.cli.options import Json, LogFile, Model, Output, Quiet, Verbose
from ktc.cli.session import Session


def fmt_command(
    files: Annotated[list[Path], typer.Argument(help="Rule files, or folders of them.")],
    check: Annotated[bool, typer.Option("--check", help="Change nothing; fail if a file is not laid out so.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Lay rule files out canonically; comments stay where they are."""
    with Session(as_json, quiet=quiet) as session:
        from ktc.dsl import formatter

        changed: list[str] = []
        session.result({"check": check, "changed": changed})
        for path in formatter.rule_files(files):
            if formatter.format_file(path, write=not check):
                changed.append(str(path))
                session.console.print(f"{path}: " + ("is not laid out canonically" if check else "rewritten"))
                session.exit_code = 1 if check else 0


def explain_command(
    code: Annotated[str, typer.Argument(help="A code as messages show it, for example E042.")],
    as_json: Json = False,
) -> None:
    """Say what the code of a message means, with a bad and a good example."""
    with Session(as_json) as session:
        from ktc.explain import explain

        found = explain(code)
        session.result(asdict(found))
        if not as_json:
            session.emit(str(found), None)


def import_kt_yaml_command(
    file: Annotated[Path, typer.Argument(help="A YAML file of KTransformers optimize rules.")],
    model: Model,
    output: Output = None,
    as_json: Json = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    log_file: LogFile = None,
) -> None:
    """Turn the optimize rules in FILE into a rule file for MODEL, verified module by module."""
    with Session(as_json, verbose, quiet, log_file) as session:
        session.require_versions()
        from ktc.kt_yaml import import_kt_yaml

        found = import_kt_yaml(file, model)
        session.diagnose(found.warnings, found.sources)
        session.result(found.to_json())
        if output is not None or not as_json:
            session.emit(found.program, output)
        if not quiet:
            typer.echo(str(found.report), err=True, nl=False)

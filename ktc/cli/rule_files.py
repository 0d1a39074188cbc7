"""`ktc fmt`, `ktc explain` and `ktc import-kt-yaml`: the commands for authors of rules.

In: the options. Out: formatted rule files, the meaning of a code, or a rule file made from a file of KTransformers.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ktc.cli.early_checks import require_model, require_readable
from ktc.cli.options import Model, Output
from ktc.cli.session import Session
from ktc.cli.session_options import in_session


@in_session("as_json", "quiet", writes=("files",))
def fmt_command(
    session: Session,
    files: Annotated[list[Path], typer.Argument(help="Rule files, or folders of them.")],
    check: Annotated[bool, typer.Option("--check", help="Change no file; exit 1 if a file is not formatted.")] = False,
) -> None:
    """Format rule files; comments keep their places."""
    from ktc.language.dsl import formatter

    changed: list[str] = []
    session.result({"check": check, "changed": changed})
    paths = formatter.rule_files(files)
    for path in paths:
        if formatter.format_file(path, write=not check):
            changed.append(str(path))
            session.show(f"{path}: " + ("is not formatted" if check else "rewritten"))
            session.exit_code = 1 if check else 0
    session.next(*(("ktc", "check", paths[0]) if paths else ()))


@in_session("as_json")
def explain_command(
    session: Session,
    code: Annotated[str, typer.Argument(help="The code of a message, for example E042.")],
) -> None:
    """Explain the code of a message, with an invalid and a valid example."""
    from ktc.language.explain import explain

    explanation = explain(code)
    session.result(asdict(explanation))
    if not session.as_json:
        session.emit(str(explanation), None)


@in_session()
def import_kt_yaml_command(
    session: Session,
    file: Annotated[Path, typer.Argument(help="A YAML file of KTransformers optimize rules.")],
    model: Model,
    output: Output = None,
) -> None:
    """Convert the optimize rules in FILE to a rule file for MODEL, verified module by module."""
    require_readable(file)
    require_model(model)
    session.require_versions()
    from ktc.tools.kt_yaml import import_kt_yaml

    imported = import_kt_yaml(file, model)
    session.diagnose(imported.warnings, imported.sources)
    session.result(imported.to_json())
    if output is not None or not session.as_json:
        session.emit(imported.program, output)
    if output is None:
        session.tell(str(imported.report).rstrip())
        session.next("ktc", "import-kt-yaml", file, model, "-o", f"{file.stem}.ktr")
    else:
        session.show(str(imported.report).rstrip())
        session.next("ktc", "check", output)

"""`ktc bench`: measure ktc beside its peers. The requests' dataclasses define the commands and their options.

In: the options. Out: progress on stderr, tables on stdout, and the files of `--output`, `--plot` and `--trace`. Invalid
input is refused before the first measurement.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast, get_type_hints

import typer

from ktc.cli.bars import calls_bar
from ktc.cli.compiling import settings_of
from ktc.cli.early_checks import require_compiled, require_model
from ktc.cli.following import compiling
from ktc.cli.help_pages import Command
from ktc.cli.options import CompiledModel, ExpertsFormat, ResultsFile, RuleName, Settings
from ktc.cli.session import Session
from ktc.cli.session_options import in_session
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation import environment
from ktc.tools.bench.options import Option, Request, flag_of, parse
from ktc.tools.bench.requests import REQUESTS

if TYPE_CHECKING:
    from ktc.tools.bench.progress import ProgressSink

app = typer.Typer(help="Measure ktc beside its peers.")
# Options that other commands have too, by the name of their field.
_SHARED: Final[Mapping[str, Any]] = {
    "rule": RuleName,
    "settings": Settings,
    "weight_format": ExpertsFormat,
    "out": CompiledModel,
}
_OF_MODEL: Final = ("finetune", "generate", "plans")  # whose `model` is that of `ktc compile`
_REQUIRED: Final = ("model", "out")  # fields that a user has to name, where they have no default


@app.callback()
def bench() -> None:
    """Measure ktc beside its peers."""


def _command(kind: type[Request]) -> Callable[..., None]:
    """Return the command of a benchmark, with the fields of its request as options."""

    def command(session: Session, **typed: Any) -> None:
        output: Path | None = typed.pop("output")
        if environment.process_rank() != 0:  # under torchrun, only rank 0 reports
            session.mute()
            output = None
        if "settings" in typed:
            typed["settings"] = settings_of(typed["settings"])
        if kind.command in _OF_MODEL:
            require_model(typed["model"])
        if "out" in typed:
            require_compiled(typed["out"])
        request = parse(kind, typed)
        _check_files(request, output)
        session.require_versions()
        session.raise_if_interrupted()
        with watching(session) as sink:
            report = importlib.import_module(request.module).run(request, sink)
        _show(session, request, report, output)

    session = inspect.Parameter("session", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Session)
    results = inspect.Parameter("output", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ResultsFile)
    hints = get_type_hints(kind, localns={"Isa": str})
    options = [_parameter(field, hints[field.name]) for field in fields(kind) if _is_option(field)]
    command.__doc__ = (kind.__doc__ or "").partition("\n")[0]
    cast("Any", command).__signature__ = inspect.Signature([session, *options, results])
    return in_session()(command)


def _is_option(known: Field[Any]) -> bool:
    return "option" in known.metadata or known.name in _SHARED


def _parameter(known: Field[Any], hint: Any) -> inspect.Parameter:
    details: Option | None = known.metadata.get("option")
    default = known.default
    if details is None:
        annotation = _SHARED[known.name]
        default = None if default is MISSING else default
    else:
        listed = details.read is not None
        named = typer.Option(
            flag_of(known), metavar=details.metavar, help=details.help, min=details.least, max=details.most
        )
        annotation = Annotated[str if listed else hint, named]
        if listed:
            default = ("-" if details.metavar == "A-B" else ",").join(map(str, cast("tuple[object, ...]", default)))
    if default in ("", Path()) and known.name in _REQUIRED:
        default = inspect.Parameter.empty
    return inspect.Parameter(known.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _check_files(request: Request, output: Path | None) -> None:
    """Raise InputRefused (U003, U030) or HostLacks (H242) for files that cannot be written, or are the same."""
    named = {name: path for name, path in {"--output": output, **request.files}.items() if path is not None}
    if "--plot" in named:
        from ktc.tools.bench.plot import require_drawable

        require_drawable(named["--plot"], request.picture)
    for (option, path), (other, its) in itertools.combinations(named.items(), 2):
        if path.absolute() == its.absolute():
            raise InputRefused(Diagnostic("U030", f"`{option}` and `{other}` are both `{path}`", hint="name two files"))
    for path in named.values():
        _require_writable(path)


def _require_writable(output: Path) -> None:
    target = output.absolute()
    existing = next(folder for folder in (target, *target.parents) if folder.exists())
    if target.is_dir():
        reason = "it is a folder"
    elif existing != target and not existing.is_dir():
        reason = f"`{existing}` is not a folder"
    elif not os.access(existing, os.W_OK):
        reason = "permission denied"
    else:
        return
    raise InputRefused(Diagnostic("U003", f"cannot write `{output}`: {reason}"))


def _show(session: Session, request: Request, report: Any, output: Path | None) -> None:
    """Print the report, write its files, and raise InputRefused for its fault."""
    from ktc.tools.bench.plot import write_figure
    from ktc.tools.bench.report import tables

    values = report.to_json()
    session.note(f"measured {request}")
    session.result(values)
    session.show(tables(report))
    if output is not None:
        session.emit(json.dumps(values, indent=2), output)
    for option, file in request.files.items():
        if file is not None:
            if option == "--plot":
                write_figure(report.figure(), file)
            session.console.print(f"wrote {file}")
    if report.fault is not None:
        raise InputRefused(report.fault)
    session.next(*(request.following or compiling("tiny:qwen3_moe")))


@contextmanager
def watching(session: Session) -> Generator[ProgressSink]:
    """Show a line for each finished stage, part and step, and on a terminal a bar for the running part."""
    from ktc.cli.report import StageReport
    from ktc.tools.bench.progress import ProgressSink

    def finished(what: str) -> None:
        session.note(what)
        session.console.print(f"  {what}", markup=False, soft_wrap=True)

    with calls_bar(session) as progress:
        yield ProgressSink(StageReport(session, session.console).observe, progress, finished)


for _kind in REQUESTS:
    app.command(_kind.command, cls=Command)(_command(_kind))

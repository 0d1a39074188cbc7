"""`ktc train`: a compiled model tuned on a file of examples; the settings' dataclass gives the options.

In: flags, and a YAML file of the same names. Out: what a `Session` shows and prints. Ctrl-C ends the run after the step
that is running, with a checkpoint and exit code 130; a second one ends it at once.
"""

from __future__ import annotations

import inspect
import shlex
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, cast, get_args, get_origin

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ktc import environment
from ktc.cli.options import CompiledModel, Json, LogFile, Quiet, Trust, Verbose, Weights
from ktc.cli.session import INTERRUPTED, Session
from ktc.cli.tables import count, relative
from ktc.diagnostics import Diagnostic
from ktc.tune.settings import TrainSettings, types_of_settings

if TYPE_CHECKING:
    from ktc.training.run_report import RunReport
    from ktc.tune.tokenised import DataSummary
    from ktc.tune.types import Place, PreparedData, Progress, TrainResult

Command = Callable[..., None]
_LINES = 20  # of progress, where stderr is no terminal


def train_command(
    out: CompiledModel,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The run's folder. Default: OUT's name and `-adapter`.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="A YAML file of the settings below; flags win over it.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="auto|PATH", help="Go on from the last checkpoint, or from PATH.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the run in the output folder.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "--data-check", help="Show the data as tokens; train nothing.")
    ] = False,
    weights: Weights = None,
    trust: Trust = False,
    as_json: Json = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    log_file: LogFile = None,
    **flags: Any,
) -> None:
    """Fine-tune OUT with LoRA on a file of examples; the adapter loads on the original model with stock PEFT."""
    is_first = environment.process_rank() == 0  # of the processes that torchrun started; it speaks for all
    with Session(as_json and is_first, verbose, quiet or not is_first, log_file) as session:
        session.require_versions()
        from ktc.tune import train

        place = train.Place(out, output or train.default_output(out), resume, force, weights, trust)
        if flags["targets"] is not None:
            flags["targets"] = tuple(name.strip() for name in flags["targets"].split(",") if name.strip())
        settings = train.settings_for(place, config, flags)
        if dry_run:
            data = train.prepare(place, settings)
            _show_data(session, data, first=True)
            session.result({"data": _data_json(data)})
            return
        with _Watching(session) as watching, _stopping(session) as stop:
            result = train.run(place, settings, observe=watching.observe, stop=stop)
        _finish(session, place, result)


def register(app: typer.Typer) -> None:
    """Adds the command, with an option for every setting."""
    app.command("train")(_with_settings(train_command))


def _with_settings(command: Command) -> Command:
    """The command with the fields of `TrainSettings` as options in place of `**flags`, which typer cannot read."""
    signature = inspect.signature(command, eval_str=True)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(each.name))
        for each in fields(TrainSettings)
    ]

    def run(**arguments: Any) -> None:
        command(**arguments)

    run.__doc__ = command.__doc__
    cast("Any", run).__signature__ = signature.replace(parameters=[*own, *options])
    return run


def _option(name: str) -> Any:
    field = next(each for each in fields(TrainSettings) if each.name == name)
    flag = f"--{name.replace('_', '-')}"
    wanted = types_of_settings()[name]
    kinds = [each for each in (get_args(wanted) if _is_union(wanted) else (wanted,)) if each is not type(None)]
    kind = str if get_origin(kinds[0]) is tuple else kinds[0]
    shown = "" if field.default in (None, ()) or kind is bool else f" [default: {field.default}]"
    metavar = "NAME,..." if get_origin(kinds[0]) is tuple else None
    declared = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
    return Annotated[kind | None, typer.Option(declared, metavar=metavar, help=f"{field.metadata['help']}{shown}")]


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType)


# While it runs -------------------------------------------------------------------------------------------------------
@contextmanager
def _stopping(session: Session) -> Generator[Callable[[], bool]]:
    """While inside, the first Ctrl-C (or SIGTERM) asks the run to stop after its step; another one interrupts it."""
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        session.console.print("stopping after this step, with a checkpoint; press Ctrl-C again to stop at once")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Watching:
    """A bar with step, loss, tokens per second and the time left; lines now and then where stderr is no terminal."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._bar: Any = None
        self._task: Any = None
        self._told = 0

    def __enter__(self) -> _Watching:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def observe(self, event: str, value: object) -> None:
        """The run's `observe`."""
        if event == "data":
            _show_data(self._session, cast("PreparedData", value))
        elif event == "step":
            self._step(cast("Progress", value))

    def _step(self, now: Progress) -> None:
        loss = "" if now.loss is None else f"loss {now.loss:.4f}"
        speed = f"{now.tokens_per_second:,.0f} token/s"
        self._session.note(f"step {now.step} of {now.steps}  {loss}  {speed}")
        console = self._session.console
        if not console.is_terminal:
            part = now.step * _LINES // now.steps
            if part == self._told:
                return
            self._told = part
            console.print(f"  step {now.step} of {now.steps}  {loss}  {speed}")
            return
        self._bar = self._bar or _bar(console)
        if self._task is None:
            self._task = self._bar.add_task("training", total=now.steps, loss=loss, speed=speed)
        self._bar.update(self._task, completed=now.step, loss=loss, speed=speed)


def _bar(console: Console) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[speed]}"), TimeRemainingColumn(),
    )  # fmt: skip
    bar = Progress(*columns, console=console, transient=True)
    bar.start()
    return bar


# What it shows -------------------------------------------------------------------------------------------------------
def _show_data(session: Session, data: PreparedData, *, first: bool = False) -> None:
    session.diagnose(data.train.notes)
    parts = [("training data", data.train.summary)]
    if data.held_out is not None:
        parts.append(("held-out data", data.held_out.summary))
    for title, summary in parts:
        _say(session, _data_line(title, summary), shown=first)
    if first:
        session.show(_lengths(data.train.summary))
        session.show(Text("the first row, what is learned in green:"))
        session.show(_first(data.train.summary))


def _say(session: Session, text: str, *, shown: bool) -> None:
    if shown:
        session.show(Text(text))
    else:
        session.console.print(f"  {text}", markup=False, soft_wrap=True)


def _data_line(title: str, data: DataSummary) -> str:
    found = " (found)" if data.detected else ""
    cut = f", {data.cut} cut, {data.dropped} dropped" if data.cut or data.dropped else ""
    return (
        f"{title}: {count(data.rows, 'row')} of `{data.file}`, format {data.format}{found}, template {data.template}; "
        f"{count(data.tokens, 'token')}, {data.learned:,} learned; "
        f"lengths {data.shortest} to {data.longest}, at most {data.limit}{cut}"
    )


def _lengths(data: DataSummary) -> Table:
    table = Table("tokens", "rows", "", box=None, pad_edge=False, header_style="bold")
    most = max(each.rows for each in data.lengths) or 1
    for each in data.lengths:
        table.add_row(f"{each.low} to {each.high}", f"{each.rows:,}", "█" * round(30 * each.rows / most))
    return table


def _first(data: DataSummary) -> Text:
    """The row with what is learned marked, also where there are no colours."""
    shown = Text()
    for text, learned in data.first:
        shown.append(f"[[{text}]]" if learned else text, style="green" if learned else "")
    return shown


def _data_json(data: PreparedData) -> dict[str, Any]:
    held_out = None if data.held_out is None else data.held_out.summary.to_json()
    return {"train": data.train.summary.to_json(), "held_out": held_out}


def _finish(session: Session, place: Place, result: TrainResult) -> None:
    report = result.report
    session.result({"output": str(result.output), "report": report.to_json(), "data": _data_json(result.data)})
    if result.interrupted:
        again = shlex.join(_going_on(place))
        session.diagnose([Diagnostic("T528", f"stopped after step {report.steps}", hint=f"go on: `{again}`")])
        session.exit_code = INTERRUPTED
        return
    session.show(_report_table(report))
    session.show(Text(f"{relative(result.output.absolute())} holds the adapter, report.html and the checkpoints"))


def _going_on(place: Place) -> list[str]:
    """The command that goes on with the run; what `train.yaml` does not keep is named again."""
    moved = [] if place.weights is None else ["--weights", str(place.weights)]
    trusted = ["--trust-remote-code"] if place.trusted else []
    return ["ktc", "train", str(place.out), "--output", str(place.output), "--resume", "auto", *moved, *trusted]


def _report_table(report: RunReport) -> Table:
    from ktc.tune.run_page import facts

    table = Table("", "", box=None, pad_edge=False, show_header=False)
    for name, value in facts(report):
        table.add_row(name, Text(value))
    return table

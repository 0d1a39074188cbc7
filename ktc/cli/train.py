"""`ktc train`: fine-tune a compiled model on a file of examples; the settings' dataclass defines the options.

In: flags, and a YAML file of the same names. Out: the output of a `Session`. Ctrl-C ends the run after the current
step, with a checkpoint and exit code 130. A second Ctrl-C ends it at once.
"""

from __future__ import annotations

import inspect
import shlex
import signal
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Final, Union, cast, get_args, get_origin

import typer

from ktc.cli.amounts import relative
from ktc.cli.early_checks import require_given
from ktc.cli.following import answering, loading
from ktc.cli.given_model import GivenModel, Recompile, Wish, compiled, named_after, run_compiled, shown
from ktc.cli.options import Experts, TextOnly, Trust, Weights
from ktc.cli.session import INTERRUPTED, Session
from ktc.cli.session_options import in_session
from ktc.diagnostics import Diagnostic
from ktc.foundation import environment
from ktc.training.tune.settings import (
    TrainSettings,
    read_settings,
    repeating_settings,
    require_data,
    types_of_settings,
)

if TYPE_CHECKING:
    from ktc.training.tune.types import PreparedData, RunPaths, TrainResult

Command = Callable[..., None]
_ALONE: Final = "alone"  # several processes had too little memory on a GPU
# The titles of groups of settings in `--help`; the other settings are under "Training".
_GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "Data": ("data", "format", "column", "template", "eval_data", "eval_split", "streaming", "length", "truncate",
             "packing", "train_on_prompt"),
    "The adapter": ("rank", "alpha", "dropout", "rslora", "targets"),
    "Evaluation and checkpoints": ("logging_steps", "eval_steps", "save_steps", "save_total_limit", "early_stopping",
                                   "tensorboard", "report_to"),
}  # fmt: skip


@in_session()
def train_command(
    session: Session,
    model: GivenModel,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The run's folder. Default: the model's name and `-adapter`.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="A YAML file of the settings below; flags override it.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="auto|PATH", help="Continue from the last checkpoint, or from PATH."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the run in the output folder.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "--data-check", help="Show the data as tokens; do not train.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE.json", help="Write the timeline of one step as a Chrome trace."),
    ] = None,
    experts: Experts = False,
    text_only: TextOnly = False,
    recompile: Recompile = False,
    weights: Weights = None,
    trust: Trust = False,
    **flags: Any,
) -> None:
    """Fine-tune a model with LoRA on a file of examples; the adapter loads on the original with stock PEFT."""
    from ktc.cli.started import CLAIMED, mark, watch_starter

    if environment.process_rank() != 0:  # only rank 0 prints
        session.mute()
    watch_starter()
    for setting in ("targets", "report_to"):
        if flags[setting] is not None:
            flags[setting] = tuple(name.strip() for name in flags[setting].split(",") if name.strip())
    flags |= {name: tuple(flags[name]) if flags[name] else None for name in repeating_settings()}
    require_given(model)
    from ktc.training.tune.packages import require_packages

    require_packages()
    if resume is None:  # a resumed run has settings of its own
        from ktc.training.tune.examples import check_data

        given = read_settings(config, flags)
        require_data(given)
        check_data(given)
    session.require_versions()
    from ktc.cli.bars import steps_bar
    from ktc.cli.processes import count_of, run_in_processes
    from ktc.cli.train_progress import TrainProgress, show_data
    from ktc.training.tune import train

    wish = Wish.of("train", recompile=recompile, trust=trust, weights=weights, text_only=text_only, experts=experts)
    place = output or train.default_output(named_after(model))
    paths = train.RunPaths(named_after(model), place, resume, force, weights, trust, trace)
    settings = train.settings_for(paths, config, flags)
    if dry_run:
        paths = replace(paths, out=compiled(session, model, wish))
        with steps_bar(session, "reading the data"):
            data = train.prepare(paths, settings)
        show_data(session, data, first=True)
        session.result({"data": _data_json(data)})
        return

    def run(out: Path) -> TrainResult:
        if _ALONE not in seen and (count := count_of(session, out, settings)) > 1:
            train.require_usable(paths)
            seen.update(run_in_processes(session, out, count, may_fall_back=settings.processes is None))
            seen.add(_ALONE)
        of_plan = train.started_again(paths, out, claimed=CLAIMED in seen)
        runs.append(out)
        with TrainProgress(session) as progress, _stopping(session) as stop, steps_bar(session, "reading the data"):

            def observe(event: str, value: object) -> None:
                seen.add(event)
                mark(event)
                progress.observe(event, value)

            return train.run(of_plan, settings, observe=observe, stop=stop)

    runs, seen = list[Path](), set[str]()
    result = run_compiled(session, model, wish, run)
    _finish(session, model, wish, replace(paths, out=runs[-1]), result)


def command() -> Command:
    """Return `train_command` with the fields of `TrainSettings` as options; typer cannot read `**flags`."""
    signature = inspect.signature(train_command, eval_str=True)
    *parameters, _ = signature.parameters.values()
    options = [
        inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(setting.name))
        for setting in fields(TrainSettings)
    ]

    def run(**arguments: Any) -> None:
        train_command(**arguments)

    run.__doc__ = train_command.__doc__
    cast("Any", run).__signature__ = signature.replace(parameters=[*parameters, *options])
    return run


def _option(name: str) -> Any:
    field = next(setting for setting in fields(TrainSettings) if setting.name == name)
    flag = f"--{name.replace('_', '-')}"
    wanted = types_of_settings()[name]
    options = get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)
    kind = next(option for option in options if option is not type(None))
    metavar = None
    if get_origin(kind) is tuple:
        repeated = "NAME=COLUMN" if name == "column" else "DATA"
        metavar, kind = (repeated, list[str]) if field.metadata["repeats"] else ("NAME,...", str)
    shown = "" if field.default in (None, ()) or kind is bool else f" [default: {field.default}]"
    declared = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
    group = next((title for title, names in _GROUPS.items() if name in names), "Training")
    text = f"{field.metadata['help']}{shown}"
    return Annotated[kind | None, typer.Option(declared, metavar=metavar, help=text, rich_help_panel=group)]


@contextmanager
def _stopping(session: Session) -> Generator[Callable[[], bool]]:
    """Stop the run after its step at the first Ctrl-C (or SIGTERM), and interrupt it at the second."""
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


def _finish(session: Session, model: str, wish: Wish, paths: RunPaths, result: TrainResult) -> None:
    from ktc.cli.train_progress import report_table

    report = result.report
    session.result({"output": str(result.output), "report": report.to_json(), "data": _data_json(result.data)})
    if result.interrupted:
        again = shlex.join(_resuming(model, wish, paths))
        stopped = Diagnostic("T528", f"stopped after step {report.steps}", hint=f"to continue: `{again}`")
        session.diagnose([stopped] if environment.process_rank() == 0 else [])
        session.exit_code = INTERRUPTED
        return
    session.show(report_table(report))
    run = relative(result.output.absolute())
    session.show(f"{run} has the adapter, report.html and the checkpoints")
    session.next(*answering(shown(model), run, weights=paths.weights, trust=paths.trusted, text_only=wish.text_only))


def _data_json(data: PreparedData) -> dict[str, Any]:
    held_out = None if data.held_out is None else asdict(data.held_out.summary)
    return {"train": asdict(data.train.summary), "held_out": held_out}


def _resuming(model: str, wish: Wish, paths: RunPaths) -> list[str]:
    """Return the command that continues the run, with the options that `train.yaml` does not store."""
    options = (
        "--output",
        paths.output,
        "--resume",
        "auto",
        *loading(paths.weights, paths.trusted, text_only=wish.text_only),
    )
    options += ("--experts",) if "experts" in wish.settings else ()
    return ["ktc", "train", *map(str, (model, *options))]

"""Fine-tuning a compiled model: `ktc train` and `ktc.train`.

In: a compiled model, training data, settings. Out: a folder with the adapter in PEFT's format, checkpoints, the
settings of the run, and a report. Refused before anything is loaded: bad settings and data (T501 to T520), a folder
in use or occupied (T521 to T525), settings that a library refuses (T508). Then: layers that the model does not have
(T526).
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation import environment
from ktc.foundation.files import refusing, write_file
from ktc.training.tune import run_folder
from ktc.training.tune.packages import require_packages
from ktc.training.tune.prepare import prepare
from ktc.training.tune.settings import TrainSettings, read_settings, require_data
from ktc.training.tune.types import Observe, PreparedData, RunPaths, Stop, TrainResult


def train(
    out: str | Path,
    data: str | Path | Sequence[str | Path] | None = None,
    *,
    output: str | Path | None = None,
    config: str | Path | None = None,
    resume: str | None = None,
    force: bool = False,
    trace: str | Path | None = None,
    **settings: Any,
) -> TrainResult:
    """Tune the compiled model in `out` on `data` and write the adapter to `output`.

    `data` is a source or several, as `ktc train --data` takes them: files, folders, patterns, data sets of the hub.
    `config` names a YAML file of settings; `settings` are those of `TrainSettings` and override it. `resume` continues
    a run ("auto", or a checkpoint's path), `force` replaces one. `trace` is a file for the timeline of one step.
    `settings` may also have `weights` and `trust_remote_code`, as `ktc.load` takes them. Raises InputRefused with all
    faults.
    """
    weights, trusted = settings.pop("weights", None), settings.pop("trust_remote_code", False)
    paths = RunPaths(
        Path(out),
        Path(output) if output else default_output(Path(out)),
        resume,
        force,
        Path(weights) if weights else None,
        trusted,
        Path(trace) if trace else None,
    )
    named = {name: _names(value) for name, value in (("data", data), ("eval_data", settings.pop("eval_data", None)))}
    flags = {**settings, **named}
    return run(paths, settings_for(paths, Path(config) if config else None, flags))


def _names(sources: str | Path | Sequence[str | Path] | None) -> tuple[str, ...] | None:
    """Return the sources of an argument as texts, None for none."""
    if sources is None:
        return None
    return (str(sources),) if isinstance(sources, str | Path) else tuple(map(str, sources))


def default_output(out: Path) -> Path:
    """Return a folder in the working directory, named after the model."""
    return Path(f"{out.absolute().name}-adapter")


def settings_for(paths: RunPaths, config: Path | None, flags: dict[str, Any]) -> TrainSettings:
    """Return the settings of the run from `config` and `flags`; a resumed run without a config keeps its own.

    Raises InputRefused with all faults, HostLacks (H230) where the packages of training are missing.
    """
    require_packages()
    kept = run_folder.settings_file(paths.output) if paths.resume else None
    settings = read_settings(config or kept, flags)
    require_data(settings)
    if kept is not None:
        run_folder.require_same_run(paths.output, settings, read_settings(kept, {}))
    return settings


def _warn(event: str, value: object) -> None:
    """Warn of findings about data, adapter, a resumed run's damaged checkpoints and its steps; ignore other events."""
    findings: tuple[Diagnostic, ...] = ()
    if isinstance(value, run_folder.RunFolder):
        findings = value.left_out
    elif isinstance(value, PreparedData):
        findings = value.notes
    elif event in ("adapter", "trained"):
        findings = cast("tuple[Diagnostic, ...]", value)
    for finding in findings:
        warnings.warn(f"{finding.message} ({finding.hint})" if finding.hint else finding.message, stacklevel=2)


def require_usable(paths: RunPaths) -> None:
    """Raise InputRefused (T521, T523, T524) where a run cannot have its folder. Nothing is written."""
    run_folder.require_usable(paths.output, resume=paths.resume, force=paths.force)


def run(
    paths: RunPaths, settings: TrainSettings, *, observe: Observe = _warn, stop: Stop = lambda: False
) -> TrainResult:
    """Run the training. `observe` receives `data`, `folder`, `adapter`, `model`, each `step`, `trained` and `saved`.

    `stop` is called after each step; a run that it stops saves a checkpoint first. Each of several processes calls
    this, and rank 0 writes.

    Raises:
        InputRefused: T503 for another number of `processes` than run; T521 to T524 for the folder.
    """
    _require_processes(settings)
    from ktc.training.tune.training_run import TrainingRun

    with ExitStack() as undone:
        if environment.process_rank() == 0:  # the one that will claim the folder
            require_usable(paths)
            if paths.trace is not None:
                undone.enter_context(_empty_trace(paths.trace))
        data = prepare(paths, settings)
        if paths.resume:
            run_folder.require_same_data(paths.output, data.train)
        observe("data", data)
        return TrainingRun(paths, settings, data, observe, stop).finish()


def _require_processes(settings: TrainSettings) -> None:
    running = environment.world_size()
    if settings.processes not in (None, running):
        message = f"`processes` is {settings.processes}, and this run has {running}"
        hint = f"leave it out or give {running}: only the command `ktc train` starts processes, without torchrun"
        raise InputRefused(Diagnostic("T503", message, hint=hint))


def started_again(paths: RunPaths, out: Path, *, claimed: bool) -> RunPaths:
    """Return the paths of a run that failed, for a run on `out`.

    A run that had `claimed` its folder continues from its last checkpoint, or replaces what it left; one that resumed
    does so again.
    """
    if not claimed or paths.resume:
        return replace(paths, out=out)
    if run_folder.checkpoints(paths.output):
        return replace(paths, out=out, resume="auto")
    return replace(paths, out=out, force=True)


@contextmanager
def _empty_trace(file: Path) -> Generator[None]:
    """Write an empty trace before the long work, and remove it if the input is refused."""
    existed = file.exists()
    with refusing(file):
        write_file(file, "{}\n")
    try:
        yield
    except InputRefused:
        if not existed:
            file.unlink(missing_ok=True)
        raise

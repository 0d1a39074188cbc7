"""The output file of a benchmark, checked before it runs, and the bar that shows its rounds."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ktc.cli.session import Session
from ktc.diagnostics import Diagnostic, InputRefused


def require_writable(output: Path, plot: Path | None = None) -> None:
    """Check before a run that `--output` is writable.

    Raises:
        InputRefused: `output` is not writable (U003), or it is also the file of `--plot` (U030).
    """
    target = output.absolute()
    if plot is not None and target == plot.absolute():
        raise InputRefused(Diagnostic("U030", f"`--output` and `--plot` are both `{output}`", hint="name two files"))
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


@contextmanager
def bar_of(session: Session) -> Generator[Callable[[int, int, str], None]]:
    """Yield a function that shows the rounds done, the rounds in all, and the running measurement."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns: Sequence[Any] = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=session.console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def progress(done: int, total: int, now: str) -> None:
            session.go_on()
            bar.update(task, completed=done, total=total or None, description=now)

        yield progress

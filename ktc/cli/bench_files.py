"""The output files of a benchmark, checked before it runs, and the bar that shows its rounds."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ktc.cli.session import Session
from ktc.diagnostics import Diagnostic, InputRefused


def require_distinct(files: Mapping[str, Path | None]) -> None:
    """Raise InputRefused (U030) if two options name the same file."""
    named = [(option, path) for option, path in files.items() if path is not None]
    for (option, path), (other, its) in itertools.combinations(named, 2):
        if path.absolute() == its.absolute():
            message = f"`{option}` and `{other}` are both `{path}`"
            raise InputRefused(Diagnostic("U030", message, hint="name two files"))


def require_writable(output: Path) -> None:
    """Check before a run that `output` is writable.

    Raises:
        InputRefused: It is not writable (U003).
    """
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


@contextmanager
def bar_of(session: Session) -> Generator[Callable[[int, int, str], None]]:
    """Yield a function that shows the rounds done, the rounds in all, and the running measurement."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns: Sequence[Any] = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=session.console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def progress(done: int, total: int, now: str) -> None:
            session.go_on()
            bar.update(task, completed=done, total=total or None, description=now)

        yield progress

"""Progress bars on stderr, if that is a terminal: for answered rows, measured calls and the steps of a stage."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from ktc.cli.session import Session
from ktc.foundation.stage_progress import listening

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


@contextmanager
def rows_bar(session: Session, what: str, total: int) -> Generator[Callable[[int], None]]:
    """Show a bar over rows; yield the function that sets the finished rows."""
    with open_bar(session) as bar:
        task = bar.add_task(what, total=total)

        def progress(done: int) -> None:
            session.raise_if_interrupted()
            bar.update(task, completed=done)

        yield progress


@contextmanager
def calls_bar(session: Session) -> Generator[Callable[[str, int, int], None]]:
    """Show a bar over calls; yield the function that sets its name, the finished calls and all calls (0: unknown)."""
    with open_bar(session) as bar:
        task = bar.add_task("loading", total=None)

        def progress(what: str, done: int, total: int) -> None:
            session.raise_if_interrupted()
            bar.update(task, description=what, completed=done, total=total or None)

        yield progress


@contextmanager
def steps_bar(session: Session, what: str) -> Generator[None]:
    """Show a bar over the steps that the block reports through `ktc.foundation.stage_progress`."""
    open_bars: list[Progress] = []

    def report(done: int, total: int) -> None:
        session.raise_if_interrupted()
        if not open_bars:
            open_bars.append(open_bar(session))
            open_bars[0].start()
            open_bars[0].add_task(what, total=total)
        open_bars[0].update(open_bars[0].task_ids[0], completed=done, total=total)
        if done == total:
            open_bars.pop().stop()  # the loading of a model draws its own

    with listening(report):
        try:
            yield
        finally:
            for bar in open_bars:
                bar.stop()


@contextmanager
def stages_bar(console: Console, quiet: bool) -> Generator[Callable[[str, int, int | None], None]]:
    """Show a bar over the steps of one stage after another; yield the function that sets its name, steps and total.

    A stage without a total shows the time since it began.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("[dim]{task.description}[/dim]"), BarColumn(20), MofNCompleteColumn())
    left = TextColumn("[cyan]{task.fields[left]}[/cyan]")
    disabled = quiet or not sys.stderr.isatty()
    with Progress(*columns, TimeElapsedColumn(), left, console=console, transient=True, disable=disabled) as bar:
        task = bar.add_task("", total=None, left="")
        running, begun = ("", 0, None), time.monotonic()

        def progress(stage: str, done: int, total: int | None) -> None:
            nonlocal running, begun, task
            if stage != running[0]:
                bar.remove_task(task)
                task = bar.add_task(stage, total=None, left="")
            # the speed of another stage, of other steps or of steps that begin again is not that of these
            if running[0] != stage or running[2] != total or done < running[1]:
                begun = time.monotonic()
            running = stage, done, total
            bar.update(task, completed=done, total=total, left=_left(done, total, time.monotonic() - begun))

        yield progress


def _left(done: int, total: int | None, seconds: float) -> str:
    """Return the time for the other steps at the speed of the finished ones. Rich shows none before the second step."""
    if not done or total is None or done == total:
        return ""
    return f"{timedelta(seconds=round(seconds / done * (total - done)))} left"


def open_bar(session: Session, *texts: str) -> Progress:
    """Return a bar that is not started, with a column for each text that its tasks have as a field."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    fields = (TextColumn(f"{{task.fields[{text}]}}") for text in texts)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *fields, TimeRemainingColumn())
    disabled = session.quiet or not sys.stderr.isatty()
    return Progress(*columns, console=session.console, transient=True, disable=disabled)

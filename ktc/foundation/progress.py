"""How far a long read or write has come: the callback that loading and packing report to, and a bar for terminals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

Progress = Callable[[int, int], None]
"""Called after each piece with the bytes that are done and the bytes in all."""


class Tally:
    """Sums the bytes of several stages and reports them to one callback."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress, self._done = total, progress, 0

    def add(self, count: int) -> None:
        """Add finished bytes."""
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)

    def stage(self) -> Progress:
        """Return a callback for a stage that counts its own bytes from 0."""
        before = 0

        def report(done: int, total: int) -> None:
            nonlocal before
            self.add(done - before)
            before = done

        return report


@contextmanager
def progress_bar(what: str, quiet: bool = False) -> Generator[Progress | None]:
    """Yield a bar with bytes, bytes per second and the time left, if standard error is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    # One line, also on a terminal of 80 columns and with a long name: a line that wraps is not erased at the end.
    one_line = Column(no_wrap=True)
    columns = (
        TextColumn("{task.description}", table_column=Column(no_wrap=True, max_width=30, overflow="ellipsis")),
        BarColumn(None, table_column=Column(max_width=40)),
        DownloadColumn(table_column=one_line),
        TransferSpeedColumn(table_column=one_line),
        TimeRemainingColumn(table_column=one_line),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

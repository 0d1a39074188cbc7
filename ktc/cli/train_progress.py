"""The progress of `ktc train`: its data, a bar while it runs, and the facts of the finished run.

In: the events of the run's `observe`, and the run's report. Out: the output of a `Session`, and rich tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from rich.table import Table
from rich.text import Text

from ktc.cli.amounts import count
from ktc.cli.bars import open_bar
from ktc.cli.session import Session

if TYPE_CHECKING:
    from rich.progress import Progress

    from ktc.diagnostics import Diagnostic
    from ktc.training.trainers.run_report import RunReport
    from ktc.training.tune.run_folder import RunFolder
    from ktc.training.tune.tokenised import DataSummary
    from ktc.training.tune.types import PreparedData
    from ktc.training.tune.types import Progress as StepProgress

_LINES = 20  # of progress, if stderr is not a terminal


class TrainProgress:
    """A bar with step, loss, tokens per second and the time left; some lines if stderr is not a terminal."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._bar: Progress | None = None
        self._printed = 0  # of `_LINES`

    def __enter__(self) -> TrainProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def observe(self, event: str, value: object) -> None:
        """Show an event of the run; this is its `observe`."""
        if event == "data":
            show_data(self._session, cast("PreparedData", value))
        elif event in ("adapter", "trained"):
            self._session.diagnose(cast("tuple[Diagnostic, ...]", value))
        elif event == "folder":
            self._session.diagnose(cast("RunFolder", value).left_out)
        elif event == "compiling":
            line = "  the first step compiles the layers for the GPU, which takes about a minute"
            self._session.note(line)
            self._session.console.print(line)
        elif event == "step":
            self._step(cast("StepProgress", value))

    def _step(self, now: StepProgress) -> None:
        loss = "" if now.loss is None else f"loss {now.loss:.4f}"
        speed = f"{now.tokens_per_second:,.0f} token/s"
        self._session.note(f"step {now.step} of {now.steps}  {loss}  {speed}")
        console = self._session.console
        if not console.is_terminal:
            lines = now.step * _LINES // now.steps
            if lines != self._printed:
                console.print(f"  step {now.step} of {now.steps}  {loss}  {speed}")
            self._printed = lines
            return
        if self._bar is None:
            self._bar = open_bar(self._session, "loss", "speed")
            self._bar.start()
            self._bar.add_task("training", total=now.steps, loss=loss, speed=speed)
        self._bar.update(self._bar.task_ids[0], completed=now.step, loss=loss, speed=speed)


def show_data(session: Session, data: PreparedData, *, first: bool = False) -> None:
    """Show a line per set of examples; with `first` also the lengths, and the first row with its learned tokens."""
    session.diagnose(data.notes)
    parts = [("training data", data.train.summary)]
    if data.held_out is not None:
        parts.append(("held-out data", data.held_out.summary))
    for title, summary in parts:
        _say(session, _data_line(title, summary), shown=first)
    if first:
        session.show(_lengths(data.train.summary))
        session.show("the first row, with the learned tokens in green:")
        session.show(_first(data.train.summary))


def _say(session: Session, text: str, *, shown: bool) -> None:
    if shown:
        session.show(text)
    else:
        session.console.print(f"  {text}", markup=False, soft_wrap=True)


def _data_line(title: str, data: DataSummary) -> str:
    form = f"{data.format} (found)" if data.detected else data.format
    cut = f", {data.cut} cut, {data.dropped} dropped" if data.cut or data.dropped else ""
    return (
        f"{title}: {count(data.rows, 'row')} of `{data.file}`, format {form}, template {data.template}; "
        f"{count(data.tokens, 'token')}, {data.learned:,} learned; "
        f"lengths {data.shortest} to {data.longest}, at most {data.limit}{cut}"
    )


def _lengths(data: DataSummary) -> Table:
    table = Table("tokens", "rows", "", box=None, pad_edge=False, header_style="bold")
    most = max(bin_.rows for bin_ in data.lengths) or 1
    for bin_ in (bin_ for bin_ in data.lengths if bin_.rows):
        table.add_row(f"{bin_.low} to {bin_.high}", f"{bin_.rows:,}", "█" * round(30 * bin_.rows / most))
    return table


def _first(data: DataSummary) -> Text:
    """Return the first row with the learned tokens marked, also without colours."""
    shown = Text()
    for text, learned in data.first:
        shown.append(f"[[{text}]]" if learned else text, style="green" if learned else "")
    return shown


def report_table(report: RunReport) -> Table:
    """Return the facts of a finished run."""
    from ktc.training.tune.run_page import facts

    table = Table("", "", box=None, pad_edge=False, show_header=False)
    for name, value in facts(report):
        table.add_row(name, Text(value))
    return table

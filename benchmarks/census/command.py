"""The output of `ktc census`: a line per finished family, a progress bar, and the table, page or JSON at the end.

In: the names of families. Out: the progress on stderr; the census on stdout or in a file. An interrupt keeps the
families that are finished.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from datetime import date
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import cast

from rich import box
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from transformers import CONFIG_MAPPING

from census.markdown import COLUMNS, cells, markdown
from census.processes import default_jobs, examine_all
from census.types import Census, Family
from ktc import __version__
from ktc.cli.session import Session
from ktc.diagnostics import Diagnostic, InputRefused, suggest
from ktc.model import twin

_WIDE = 200  # columns of the table in a file


def run(
    session: Session, names: Sequence[str], jobs: int | None, timeout: float, form: str, output: Path | None
) -> None:
    """Examine the families `names`, `jobs` at a time, each at most `timeout` seconds, and show the findings.

    Without names, all families with experts are examined. The session's exit code is 1 if a rewrite is wrong.

    Raises:
        InputRefused: a name is not a model type (I103).
    """
    started, asked = time.perf_counter(), _asked(names)
    jobs = min(jobs or default_jobs(), len(asked))
    done: list[Family] = []
    versions = {"ktc": __version__, **{name: version(name) for name in ("torch", "transformers")}}
    try:
        with closing(examine_all(asked, jobs, timeout)) as rows:
            _collect(session, rows, len(asked), done)
    finally:
        versions["python"] = platform.python_version()
        rows = tuple(sorted(done, key=lambda family: family.family))
        census = Census(versions, rows, len(asked), time.perf_counter() - started, jobs)
        session.result(census.to_json())
        session.exit_code = 1 if census.wrong else 0
        _show(session, census, form, output)
    session.next("ktc", "check", "moe-lora", f"tiny:{asked[0]}")


def _asked(names: Sequence[str]) -> tuple[str, ...]:
    """Return the families to examine, sorted. Raises InputRefused (I103)."""
    known = list(CONFIG_MAPPING)
    faults = [
        Diagnostic(
            "I103", f"the installed transformers knows no model type `{name}`",
            hint=suggest(name, known) or "`ktc census` without `--family` finds all",
        )
        for name in names
        if name not in known
    ]  # fmt: skip
    if faults:
        raise InputRefused(*faults)
    return tuple(sorted(set(names))) if names else tuple(sorted({*twin.moe_families(), *twin.whole_families()}))


def _collect(session: Session, rows: Iterable[Family], total: int, done: list[Family]) -> None:
    """Append each row to `done` at once, so that an interrupt keeps it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = session.console
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        for row in rows:
            done.append(row)
            line = _line(row)
            console.print(line, markup=False, soft_wrap=True)
            session.note(line)
            session.raise_if_interrupted()
            bar.update(task, description=row.family, advance=1)


def _line(family: Family) -> str:
    experts = "rewritten" if family.matched else family.experts.partition(":")[0]
    state = "WRONG" if family.wrong else "proven" if family.proven else "not proven"
    first = f"  {family.reasons[0]}" if family.reasons else ""
    return f"  {family.family:20s}{family.seconds:6.1f} s  experts {experts}, {state}{first}"


def _show(session: Session, census: Census, form: str, output: Path | None) -> None:
    if session.as_json and output is None:
        return  # the session prints it
    form = "json" if session.as_json and form == "text" else form
    if form == "text" and output is None:
        session.show(Group(_table(census), Text(_summary(census))))
    else:
        session.emit(_FORMS[form](census), output)


def _page(census: Census) -> str:
    return markdown(census, date.today())


def _json(census: Census) -> str:
    return json.dumps(census.to_json(), indent=2)


def _text(census: Census) -> str:
    written = Console(file=StringIO(), width=_WIDE)
    written.print(_table(census), Text(_summary(census)))
    return cast("StringIO", written.file).getvalue()


_FORMS: dict[str, Callable[[Census], str]] = {"markdown": _page, "json": _json, "text": _text}


def _table(census: Census) -> Table:
    table = Table(*COLUMNS, box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for family in census.families:
        table.add_row(*(Text(cell) for cell in cells(family)))
    return table


def _summary(census: Census) -> str:
    counts = census.counts()
    words = ", ".join(
        f"{counts[name]} {name}" for name in ("matched", "proven", "routing", "attention", "equal", "image", "wrong")
    )
    missing = census.asked - len(census.families)
    summary = f"{counts['families']} families: {words}" + f"; interrupted, {missing} not examined" * bool(missing)
    return f"{summary}; {census.seconds:.0f} s"

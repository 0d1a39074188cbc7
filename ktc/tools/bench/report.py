"""The result of a benchmark: rows whose fields are keys of the JSON object and, where they have a head, columns.

In: frozen dataclasses with fields made by `column`. Out: JSON, and rich renderables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from ktc.diagnostics import Diagnostic


def column(head: str, form: str | Callable[[Any], str] = "{}", *, default: object = MISSING, left: bool = False) -> Any:
    """Make a field of a row that is a column of the table. `form` formats the value, or is a function of the row."""
    return field(default=default, metadata={"column": (head, form, left)})  # pyright: ignore[reportCallIssue, reportArgumentType]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A whole run. Subclasses have the rows, and facts about all of them."""

    def to_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return asdict(self)

    def shown(self) -> Iterator[str | Table]:
        """Yield the lines and tables that a person reads. A line that begins with "not measured" is dim."""
        raise NotImplementedError

    def figure(self) -> Any:
        """Return the picture of `--plot`, a figure of matplotlib."""
        raise NotImplementedError

    @property
    def fault(self) -> Diagnostic | None:
        """The reason why the run is an error, after its figures are shown."""
        return None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A measurement that is missing, and why. `where` names its case, and `case` has the fields of JSON about it."""

    impl: str
    reason: str
    where: str = ""
    case: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonReport(Report):
    """The report of a run that measures the others where an implementation cannot be measured."""

    rows: tuple[Any, ...]
    left_out: tuple[LeftOut, ...]

    @classmethod
    def of(cls, results: Iterable[object], **facts: Any) -> Self:
        """Return the report of rows and missing measurements; `facts` are its other fields."""
        results = tuple(results)
        left_out = tuple(result for result in results if isinstance(result, LeftOut))
        return cls(rows=tuple(result for result in results if result not in left_out), left_out=left_out, **facts)

    def to_json(self) -> dict[str, Any]:
        """Return the object of `--json`, with the case of each missing measurement."""
        left_out = [{"impl": entry.impl, **entry.case, "reason": entry.reason} for entry in self.left_out]
        return {**asdict(self), "left_out": left_out}

    def not_measured(self) -> Iterator[str]:
        """Yield a line for each implementation and reason, with its cases."""
        cases = dict[tuple[str, str], list[str]]()
        for entry in self.left_out:
            cases.setdefault((entry.impl, entry.reason), []).append(entry.where)
        for (impl, reason), names in cases.items():
            where = f" ({', '.join(names)})" if any(names) else ""
            yield f"not measured: {impl}{where}: {reason}"


def tables(report: Report) -> Group:
    """Return all that a person reads."""
    from rich.console import Group
    from rich.text import Text

    dim = ("not measured", "logits of", "geometric mean")
    parts = report.shown()
    return Group(*(Text(part, "dim" * part.startswith(dim)) if isinstance(part, str) else part for part in parts))


def table_of(
    rows: Sequence[Any],
    section: Callable[[Any], object] = lambda row: None,
    style: Callable[[Any], str] = lambda row: "",
) -> Table:
    """Return a row for each row, with a line between sections."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    columns = [(part.name, *part.metadata["column"]) for part in fields(rows[0]) if "column" in part.metadata]
    for _, head, _, left in columns:
        table.add_column(head, justify="left" if left else "right", overflow="fold")
    for number, row in enumerate(rows):
        if number and section(row) != section(rows[number - 1]):
            table.add_section()
        table.add_row(*(_cell(row, name, form) for name, _, form, _ in columns), style=style(row))
    return table


def _cell(row: Any, name: str, form: str | Callable[[Any], str]) -> str:
    value = getattr(row, name)
    if value is None:
        return ""
    return form.format(value) if isinstance(form, str) else form(row)


def threads_and_clock(host: Any) -> str:
    """Return `1 thread, cpu time`, of a report's host."""
    return f"{host['threads']} thread{'s' * (host['threads'] > 1)}, {host['clock']} time"

"""The tables of `ktc consistency`, and the lines below them.

In: a report. Out: rich renderables. Several models have a table of all pairs first, with mismatched cells marked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ktc.cli.tables import plain_table
from ktc.inference.consistency.report import MEANINGS, PATHS

if TYPE_CHECKING:
    from ktc.inference.consistency.report import Report
    from ktc.inference.consistency.scores import Difference

_MISMATCHED: Final = "yellow"


def modes_table(report: Report) -> Table:
    """Return a row for each model that trains and a column for each that serves: means of calls and of decoding."""
    first = "stock \\ serves" if report.against == "stock" else "trains \\ serves"
    served = [side.name for side in report.served]
    table = plain_table(first, *map(escape, served))
    table.title = "mean |dlogp|, calls and decode; mismatched cells in brackets"
    cells = iter(report.cells)
    for side in report.trained:
        row: list[Text] = []
        for _ in served:
            cell = next(cells)
            words = f"{_mean(cell.paths['calls'])}  {_mean(cell.paths['decode'])}"
            row.append(Text(words) if cell.matched else Text(f"[{words}]", style=_MISMATCHED))
        table.add_row(Text(side.name), *row)
    return table


def paths_table(report: Report) -> Table:
    """Return a row for each path of each cell."""
    heads = ("pair", "path", "mean", "p99", "max", f"> {report.large:g}", "same token", "tokens")
    table = plain_table(*heads)
    for column in table.columns[2:]:
        column.justify, column.no_wrap = "right", True
    for cell in report.cells:
        style = "" if cell.matched or len(report.cells) == 1 else _MISMATCHED
        for path in PATHS:
            pair = f"{cell.trained} -> {cell.served}" if path == PATHS[0] else ""
            table.add_row(Text(pair), path, *_cells(cell.paths[path]), style=style)
    for name, difference in report.stock_rounding.items():
        table.add_row(Text(f"stock fp32 -> {name}"), "stock's own", *_cells(difference), style="dim")
    return table


def _cells(difference: Difference) -> tuple[str, ...]:
    values = (_mean(difference), _number(difference.p99), _number(difference.largest))
    return (*values, f"{difference.above:.2%}", f"{difference.agreement:.2%}", str(difference.tokens))


def _mean(difference: Difference) -> str:
    return "0 exactly" if difference.exact else _number(difference.mean)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.1e}" if value else "0"


def verdict(report: Report, faults: tuple[str, ...]) -> Text:
    """Return the lines below the tables: the meaning of the paths, how both sides computed, and broken bounds."""
    lines = Text()
    for path in PATHS:
        lines.append(f"{path}: {MEANINGS[path]}{_exactness(report, path)}\n")
    for line in dict.fromkeys(_sides(report)):
        lines.append(f"{line}\n")
    lines.append(
        f"{report.sequences} sequences of {report.length} tokens ({report.tokens}), {report.prompt} of them the prompt "
        f"of decoding, attention {report.attention}, in {report.seconds:.1f} s"
    )
    for fault in faults:
        lines.append(f"\nRED  {fault}", style="bold red")
    return lines


def _exactness(report: Report, path: str) -> str:
    exact = [cell.paths[path].exact for cell in report.matched]  # pyright: ignore[reportArgumentType]
    if not exact:
        return ""
    matched = "" if len(report.cells) == 1 else " of matched cells"
    return f"; no bit{matched} differs" if all(exact) else f"; bits{matched} differ"


def _sides(report: Report) -> Iterator[str]:
    for side in report.trained:
        formats = f"experts {', '.join(side.experts)}" if side.experts else "no kernels of experts"
        autocast = ", autocast of bf16" if report.autocast else ""
        yield f"{side.name}: {side.dtype}, {formats}{autocast}; {side.how}"

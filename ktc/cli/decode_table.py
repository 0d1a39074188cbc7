"""The tables of `ktc bench decode`: a row per case and engine, the agreement of their logits, and a step by part.

In: a `Report`. Out: rich renderables.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from ktc.tools.bench.decode.report import Report


def tables(report: Report) -> Group:
    """Return the machine, the rows, and below them what else was found."""
    host = report.host
    threads = f"{host['threads']} thread{'s' * (host['threads'] > 1)}, {host['clock']} time"
    headline = f"{report.model}, {report.layers} layers, {report.file_format}, on {host['cpu']}, {host['isa']}"
    parts: list[Any] = [Text(f"{headline}: {threads}; read {report.read_gbps:.1f} GB/s"), _rows(report)]
    if report.parts:
        parts.append(_parts(report))
    parts += [Text(line, style="dim") for line in _found(report)]
    return Group(*parts)


def _rows(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in ("case", "implementation", "ms", "token/s", "floor ms", "of floor", "wall ms", "ktc is"):
        left = column in ("case", "implementation")
        table.add_column(column, justify="left" if left else "right", overflow="fold")
    last = None
    for row in report.rows:
        if last is not None and row.case != last:
            table.add_section()
        table.add_row(
            str(row.case) if row.case != last else "",
            row.impl,
            f"{row.ms:,.1f}",
            f"{row.tokens_per_second:,.1f}",
            "" if row.floor_ms is None else f"{row.floor_ms:,.1f}",
            "" if row.share_of_floor is None else f"{row.share_of_floor:.2f}",
            f"{row.wall_ms:,.1f}",
            "" if row.ktc_speedup is None else f"{row.ktc_speedup:.2f}x as fast",
        )
        last = row.case
    return table


def _parts(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    names = list(next(iter(report.parts.values())))
    table.add_column("a step of ktc, without native steps, ms")
    for name in (*names, "sum"):
        table.add_column(name, justify="right")
    for case, spent in report.parts.items():
        table.add_row(case, *(f"{spent[name]:.1f}" for name in names), f"{sum(spent.values()):.1f}")
    return table


def _found(report: Report) -> Iterator[str]:
    for each in report.agreement:
        yield (
            f"logits of {each.impl} after {each.prompts} prompts: {each.error:.1e} from ktc's, the same next token in "
            f"{each.same_next}, {100 * each.common:.0f} % of the ten most probable in common"
        )
    for impl in dict.fromkeys(row.impl for row in report.rows if row.ktc_speedup is not None):
        yield f"geometric mean over all cases: ktc is {report.speedup_over(impl):.2f}x as fast as {impl}"

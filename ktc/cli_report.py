"""What the commands show: the stages as they finish, and the tables at the end.

In: the values that the compiler's `observe` reports, and findings. Out: rich renderables and plain JSON values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from ktc.doctor import Finding

_STATES = {"works": ("works", "green"), "limited": ("limited", "yellow"), "missing": ("MISSING", "bold red")}


def doctor_table(findings: Iterable[Finding]) -> Table:
    """One row per finding, the remedy below what was found."""
    table = _table("", "state", "found")
    for finding in findings:
        word, style = _STATES[finding.state]
        found = Text(finding.found)
        if finding.remedy:
            found.append(f"\n{finding.remedy}", style="dim")
        table.add_row(finding.name, Text(word, style=style), found)
    return table


def _table(*columns: str) -> Table:
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in table.columns:
        column.overflow = "fold"
    return table

"""The table of `ktc bench generate`. In: a `Report`. Out: rich renderables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from ktc.tools.bench.generate.report import Report

_NAMES: Final = {"ktc": "ktc", "eager": "ktc, eager", "hf": "stock HF on the GPU"}


def tables(report: Report) -> Group:
    """Return the measured rows, the facts about them, and the reason for each missing measurement."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("")
    for column in ("batch", "context", "token/s", "step ms", "best", "experts' limit", "read GB/s", "GPU GB"):
        table.add_column(column, justify="right")
    for row in report.rows:
        limit = "" if row.experts_ms is None else f"{row.experts_ms:.1f} ({row.experts_ms / row.ms:.2f})"
        table.add_row(
            _NAMES[row.impl],
            str(row.batch),
            str(row.context),
            f"{row.tokens_per_second:.1f}",
            f"{row.ms:.1f}",
            f"{row.best_ms:.1f}",
            limit,
            f"{row.read_gbps:.0f}",
            f"{row.gpu_allocated / 1e9:.2f}",
        )
    parts: list[Any] = [Text(_headline(report)), table]
    parts += [Text(f"{_NAMES[row.impl]}, context {row.context}: {row.told}") for row in report.rows if row.told]
    parts += [Text(f"not measured: {_NAMES[each.impl]}: {each.reason}", style="dim") for each in report.left_out]
    return Group(*parts)


def _headline(report: Report) -> str:
    of_depth = "" if report.layers == report.depth else f" of {report.depth}"
    machine = report.machine
    where = f"{machine['gpus'] or 'no GPU'}; {machine['cpu']}, {machine['cores']} cores, {machine['isa']}"
    return f"{report.layers}{of_depth} layers, {report.request['steps']} new tokens, on {where}"

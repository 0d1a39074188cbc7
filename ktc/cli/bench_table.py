"""The table of `ktc bench moe`: rows by number of tokens and pass, and the reason for each missing measurement.

In: a `Report`. Out: rich renderables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from ktc.tools.bench.report import LeftOut, Report, Row


def tables(report: Report) -> Group:
    """Return the limits that the columns are shares of, the rows, and the measurements that were left out."""
    parts: list[Any] = [Text(_headline(report)), _rows(report.rows)] if report.rows else [Text("nothing was measured")]
    parts += [Text(line, style="dim") for line in _left_out(report.left_out)]
    return Group(*parts)


def _headline(report: Report) -> str:
    host = report.host
    threads = f"{host['threads']} thread{'s' * (host['threads'] > 1)}, {host['clock']} time"
    limits = f"peak {report.peak_gflops:.0f} GFLOP/s, read {report.read_gbps:.1f} GB/s"
    return f"{report.rows[0].shape} on {host['cpu']}, {', '.join(host['isa'])}: {threads}; {limits}"


def _rows(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in ("pass", "tokens", "LoRA", "implementation", "ms", "GFLOP/s", "of peak", "GB/s", "of read", "ktc is"):
        left = column in ("pass", "implementation")
        table.add_column(column, justify="left" if left else "right", overflow="fold")
    several = len({row.isa for row in rows if row.isa}) > 1
    last = None
    for row in sorted(rows, key=lambda row: (row.tokens, row.passes, row.lora_rank)):
        if last is not None and row.group != last:
            table.add_section()
        last = row.group
        table.add_row(
            row.passes,
            f"{row.tokens:,}",
            str(row.lora_rank or ""),
            f"{row.impl} {row.isa}".strip() if several else row.impl,
            f"{row.ms:,.2f}",
            f"{row.gflops:,.0f}",
            f"{row.share_of_peak:.3f}",
            f"{row.gbps:.1f}",
            f"{row.share_of_bandwidth:.3f}",
            "" if row.ktc_speedup is None else f"{row.ktc_speedup:.2f}x as fast",
        )
    return table


def _left_out(left_out: Sequence[LeftOut]) -> list[str]:
    """Return a line for each implementation and reason, with the passes and numbers of tokens that it applies to."""
    places = dict[tuple[str, str], list[str]]()
    for each in left_out:
        place = f"{each.passes} {each.tokens:,}" + f" r{each.lora_rank}" * bool(each.lora_rank)
        places.setdefault((each.impl, each.reason), []).append(place)
    return [f"not measured: {impl} ({', '.join(where)}): {reason}" for (impl, reason), where in places.items()]

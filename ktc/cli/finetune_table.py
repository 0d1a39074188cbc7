"""The tables of `ktc bench finetune`: rows, the phases of a step, and the reason for each missing measurement.

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
    from ktc.tools.bench.finetune.report import LeftOut, Report, Row

_GB = 1e9


def tables(report: Report) -> Group:
    """Return the measured rows, the facts about them, and the reason for each missing measurement."""
    parts: list[Any] = [Text(_headline(report)), _rows(report)] if report.rows else [Text("nothing was measured")]
    parts += [Text(line) for row in report.rows for line in _facts(row)]
    parts += [Text(line) for line in _distances(report)]
    parts += [Text(note) for note in report.notes]
    parts += [Text(_left_out(each), style="dim") for each in report.left_out]
    return Group(*parts)


def _headline(report: Report) -> str:
    of_depth = "" if report.layers == report.depth else f" of {report.depth}"
    machine = report.machine
    where = f"{machine['gpus'] or 'no GPU'}; {machine['cpu']}, {machine['cores']} cores, {machine['isa']}"
    return f"{report.layers}{of_depth} layers, {report.tokens_per_step:,} tokens per step, on {where}"


def _rows(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("", overflow="fold")
    table.add_column("split", overflow="fold")
    for column in ("token/s", "step s", "GPU GB", "reserved", "host GB", "loss"):
        table.add_column(column, justify="right")
    for row in report.rows:
        style = "bold" if row.best else ""
        table.add_row(
            row.name,
            str(row.split),
            f"{row.tokens_per_second:,.0f}",
            f"{row.step_time:.2f}",
            f"{row.gpu_allocated / _GB:.2f}",
            f"{row.gpu_reserved / _GB:.2f}",
            f"{row.host_peak_rss / _GB:.1f}",
            f"{row.losses[0]:.3f} to {row.losses[-1]:.3f}",
            style=style,
        )
    return table


def _facts(row: Row) -> Iterator[str]:
    name = row.name if row.impl == "ktc" else f"{row.name}, {row.split}"
    if row.phases:
        yield f"{name}: " + ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in row.phases.items() if seconds)
    if row.stacking:
        yield f"{name}: {row.stacking}"
    if row.offload:
        yield f"{name}: routed experts by {row.offload}"
    for each in row.streams:
        yield f"{name}: weights sent to {each.device}: {each}"
        if each.dropped_per_step:
            yield f"{name}: sent for nothing to {each.device}: {each.dropped_per_step / _GB:.2f} GB a step"
    if (whole := row.whole_depth) is not None:
        estimate = f"{whole.tokens_per_second:,.0f} token/s, step {whole.step_time:.2f} s"
        yield f"{name}: extrapolated to {whole.layers} layers, by those with experts: {estimate}"


def _distances(report: Report) -> Iterator[str]:
    """Yield how far the curves of each row are from the reference."""
    reference = next((row for row in report.rows if row.experts == "reference"), None)
    for row in report.rows:
        if reference is None or row is reference or row.impl != "ktc":
            continue
        loss = max(abs(one - other) for one, other in zip(row.losses, reference.losses, strict=True))
        norms = zip(row.grad_norms, reference.grad_norms, strict=True)
        norm = max((abs(one / other - 1) for one, other in norms if other), default=0.0)
        near = f"loss within {loss:.5f} of the reference, gradient norm within {norm:.2%}"
        yield f"{row.name}: {near}, over {len(row.losses)} steps"


def _left_out(each: LeftOut) -> str:
    return f"not measured: {each.impl}{f' ({each.split})' if each.split else ''}: {each.reason}"

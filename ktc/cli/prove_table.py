"""The table of `ktc prove`, and its verdict in a few lines.

In: a report. Out: rich renderables. Blocks that no rule rewrote are shown if they are red, or with `-v`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ktc.cli.amounts import count
from ktc.cli.tables import plain_table

if TYPE_CHECKING:
    from ktc.inference.prove.report import Report, Row

_COLUMNS = ("layer", "", "ktc", "stock", "ratio", "same experts", "format", "carried", "worst")


def fidelity_table(report: Report, every: bool = False) -> Table:
    """Return one row per comparison: errors against stock in fp32, of ktc and of stock in its own dtype."""
    rows: list[tuple[Row, tuple[str, ...]]] = []
    for layer in report.layers:
        for row in layer.rows:
            whole = row.kind == "layer"
            if not (every or row.red or row.rewritten or whole or row.kind == "input"):
                continue
            carried = _pair(layer.carried.ktc, layer.carried.stock) if layer.carried and whole else ""
            rows.append((row, (str(layer.index) if whole else "", *_cells(row, carried))))
    if report.final is not None:
        whole_pass = report.final.whole
        carried = _pair(whole_pass.errors.ktc, whole_pass.errors.stock) if whole_pass else ""
        rows.append((report.final.row, ("", *_cells(report.final.row, carried))))
    used = [i for i in range(len(_COLUMNS)) if i < 5 or any(cells[i] for _, cells in rows)]
    table = plain_table(*(_COLUMNS[i] for i in used))
    for column in table.columns[2:-1]:
        column.justify, column.no_wrap = "right", True
    for row, cells in rows:
        table.add_row(*(Text(cells[i]) for i in used), style="bold red" if row.red else "")
    return table


def _cells(row: Row, carried: str) -> tuple[str, ...]:
    agreement = "" if row.agreement is None else f"{row.agreement:.1%} {row.stock_agreement or 0:.1%}"
    if row.kind == "logits":
        agreement = f"token {agreement}"
    what = {"layer": "whole", "experts": f"each of {row.what}"}.get(row.kind, row.what)
    return (
        f"{what} ({row.note})" if row.note and row.kind == "experts" else what,
        _error(row.ktc),
        _error(row.stock),
        "" if row.ratio is None else f"{row.ratio:.2f}",
        agreement,
        "" if row.format_error is None else _error(row.format_error),
        carried,
        _worst(row),
    )


def _worst(row: Row) -> str:
    if not row.worst:
        return ""
    worst = row.worst[0]
    word = "expert" if row.kind == "experts" else "token"
    piece = f" {worst.piece!r}" if worst.piece else ""
    return f"{word} {worst.index}{piece} {_error(worst.error)}"


def _pair(ktc: float | None, stock: float | None) -> str:
    return f"{_error(ktc)} {_error(stock)}"


def _error(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.1e}"


def verdict(report: Report, path: Path) -> Text:
    """Return the lines below the table: every red row with its reason, then the extent of the comparison."""
    lines = Text()
    red = [(f"layer {layer.index}, {row.what or 'whole'}", row.red) for layer in report.layers for row in layer.rows]
    red += [("norm and head", report.final.row.red)] if report.final is not None else []
    for place, why in red:
        if why:
            lines.append(f"RED  {place}: {why}\n", style="bold red")
    compared = count(len(report.layers), "layer")
    if not report.red:
        lines.append(f"{compared}: no error is above twice that of stock {report.dtype}\n", style="green")
    if report.final is not None and report.final.whole is not None:
        whole = report.final.whole
        shares = f"{whole.next_token:.1%} (stock {report.dtype}: {whole.stock_next_token:.1%})"
        lines.append(f"whole forward passes: {shares} of the tokens have the next token of fp32\n")
    notes = dict.fromkeys(row.note for layer in report.layers for row in layer.rows if row.note and row.kind == "layer")
    lines.append("".join(f"{note}\n" for note in notes))
    if report.stock_read == "rows":
        lines.append("stock weights were put in place by the rows of weights.json: a wrong row is not found\n")
    read = f"experts {report.packed}"
    lines.append(f"{compared} on {report.tokens}, {read}, in {report.seconds:.1f} s; recorded in {path}")
    return lines

"""A roofline: what each implementation reached over how many operations it does per byte of weights, under the roof.

In: a report, and the path of the picture. Refused: a place that cannot be written (U003).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ktc.tools.bench.picture import new_figure, write_figure
from ktc.tools.bench.report import Report, Row

_COLORS = [f"C{number}" for number in range(10)] + ["navy", "gold", "black", "teal", "crimson"]
_MARKERS = "os^Dv<>ph"


def draw(report: Report, path: Path) -> None:
    """Write the picture atomically. Raise InputRefused (U003)."""
    write_figure(_figure(report), path)


def _figure(report: Report) -> Any:
    figure = new_figure(9, 5.5)
    axes = figure.add_subplot()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    if report.rows:
        intensities = [_intensity(row) for row in report.rows]
        _roof(axes, report, min(intensities) / 2, max(intensities) * 2)
    colors = dict(zip(dict.fromkeys(map(_name, report.rows)), itertools.cycle(_COLORS)))
    markers = dict(zip(dict.fromkeys(map(_kind, report.rows)), itertools.cycle(_MARKERS)))
    for row in report.rows:
        axes.plot(_intensity(row), row.gflops, markers[_kind(row)], color=colors[_name(row)], markersize=5, alpha=0.85)
    _label_tokens(axes, report.rows)
    for name, color in colors.items():
        axes.plot([], [], "o", color=color, label=name)
    for kind, marker in markers.items():
        axes.plot([], [], marker, color="gray", label=", ".join(word for word in kind if word))
    axes.set_xlabel("FLOPs per byte of weights")
    axes.set_ylabel("GFLOP/s")
    axes.set_title(_title(report), fontsize=10)
    axes.grid(True, which="both", linewidth=0.3, alpha=0.5)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return figure


def _intensity(row: Row) -> float:
    return row.gflops / row.gbps


def _roof(axes: Any, report: Report, left: float, right: float) -> None:
    ridge = report.peak_gflops / report.read_gbps
    corners = sorted({left, min(max(ridge, left), right), right})
    heights = [min(report.peak_gflops, report.read_gbps * corner) for corner in corners]
    axes.plot(corners, heights, color="black", linewidth=1.2)
    axes.annotate(
        f"{report.peak_gflops:,.0f} GFLOP/s", (right, report.peak_gflops), ha="right", va="bottom", fontsize=8
    )
    foot = (left, report.read_gbps * left)
    axes.annotate(
        f"{report.read_gbps:.1f} GB/s", foot, xytext=(10, 0), textcoords="offset points", va="center", fontsize=8
    )


def _name(row: Row) -> str:
    return f"{row.impl} {row.isa}".strip()


def _kind(row: Row) -> tuple[str, str]:
    return row.passes, f"LoRA r={row.lora_rank}" if row.lora_rank else ""


def _label_tokens(axes: Any, rows: Sequence[Row]) -> None:
    """Write the number of tokens once above each group of points."""
    heaps = dict[tuple[int, int], Row]()
    for row in rows:
        heap = (row.tokens, round(2 * math.log2(_intensity(row))))
        heaps[heap] = max(heaps.get(heap, row), row, key=lambda each: each.gflops)
    for (tokens, _), row in heaps.items():
        place = (_intensity(row), row.gflops)
        axes.annotate(f"T={tokens}", place, xytext=(0, 6), textcoords="offset points", ha="center", fontsize=7)


def _title(report: Report) -> str:
    host = report.host
    shape = report.rows[0].shape if report.rows else "nothing measured"
    return f"{shape}, {host['cpu']}, {', '.join(host['isa'])}, {host['threads']} thread{'s' * (host['threads'] > 1)}"

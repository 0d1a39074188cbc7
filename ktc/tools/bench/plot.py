"""The pictures of `--plot`: a roofline of experts, and the curves of training steps.

In: points or lines, and a path that ends in `.png` or `.svg`. Refused: other endings (U030), matplotlib that is not
installed (H242), a place that cannot be written (U003).
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktc.diagnostics import Diagnostic, HostLacks, InputRefused
from ktc.foundation.files import refusing, replaced_file

_ENDINGS = (".png", ".svg")
_COLORS = [f"C{number}" for number in range(10)] + ["navy", "gold", "black", "teal", "crimson"]
_MARKERS = "os^Dv<>ph"
_DASHES = ("-", "--", "-.", ":")  # lines that lie upon each other stay visible
_FEW = 60  # steps that are marked


def require_drawable(path: Path, what: str) -> None:
    """Raise InputRefused (U030, U003) or HostLacks (H242) before anything is measured. `what` names the picture."""
    if path.suffix not in _ENDINGS:
        hint = f"the ending says what is drawn: {' or '.join(_ENDINGS)}"
        raise InputRefused(Diagnostic("U030", f"`--plot` cannot draw `{path.name}`", hint=hint))
    if importlib.util.find_spec("matplotlib") is None:
        hint = "`pip install 'ktc[viz]'`, or leave `--plot` out"
        raise HostLacks(Diagnostic("H242", f"{what} needs matplotlib, which is not installed", hint=hint))
    if not path.absolute().parent.is_dir():
        raise InputRefused(Diagnostic("U003", f"cannot write `{path}`: there is no such folder"))


def write_figure(figure: Any, path: Path) -> None:
    """Write the picture atomically. Raise InputRefused (U003)."""
    matplotlib: Any = importlib.import_module("matplotlib")
    letters_stay_text = matplotlib.rc_context({"svg.fonttype": "none"})  # half the bytes
    with refusing(path), replaced_file(path) as beside, letters_stay_text:
        figure.savefig(beside, format=path.suffix[1:], bbox_inches="tight", dpi=150)


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a roofline: FLOPs per byte, GFLOP/s, the implementation, the kind of measurement, its tokens."""

    intensity: float
    gflops: float
    name: str
    kind: str
    tokens: int


def roofline(title: str, points: Sequence[Point], peak_gflops: float, read_gbps: float) -> Any:
    """Return a figure of GFLOP/s over FLOPs per byte of weights, under the machine's two limits."""
    figure = _new_figure(9, 5.5)
    axes = figure.add_subplot()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    if points:
        _roof(axes, [point.intensity for point in points], peak_gflops, read_gbps)
    colors = dict(zip(dict.fromkeys(point.name for point in points), itertools.cycle(_COLORS)))
    markers = dict(zip(dict.fromkeys(point.kind for point in points), itertools.cycle(_MARKERS)))
    highest = dict[tuple[int, int], Point]()
    for point in points:
        style = {"color": colors[point.name], "markersize": 5, "alpha": 0.85}
        axes.plot(point.intensity, point.gflops, markers[point.kind], **style)
        heap = (point.tokens, round(2 * math.log2(point.intensity)))
        highest[heap] = max(highest.get(heap, point), point, key=lambda other: other.gflops)
    for (tokens, _), point in highest.items():
        _note(axes, f"T={tokens}", (point.intensity, point.gflops), (0, 6), ha="center", fontsize=7)
    for name, color in colors.items():
        axes.plot([], [], "o", color=color, label=name)
    for kind, marker in markers.items():
        axes.plot([], [], marker, color="gray", label=kind)
    axes.set_xlabel("FLOPs per byte of weights")
    axes.set_ylabel("GFLOP/s")
    axes.set_title(title, fontsize=10)
    axes.grid(True, which="both", linewidth=0.3, alpha=0.5)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return figure


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of values by step; `pale` lines are below the others."""

    name: str
    values: Mapping[str, Sequence[float]]  # by panel
    pale: bool


def curves(title: str, panels: Sequence[str], lines: Sequence[Curve]) -> Any:
    """Return a figure with a panel for each quantity and a line for each curve."""
    figure = _new_figure(10, 4.2)
    for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for number, line in enumerate(sorted(lines, key=lambda line: not line.pale)):
            values = line.values[panel]
            style = {"linewidth": 3.5 if line.pale else 1.2, "color": "lightgray" if line.pale else None}
            marker = "." if len(values) <= _FEW else ""
            axes.plot(range(1, len(values) + 1), values, _DASHES[number % 4], marker=marker, label=line.name, **style)
        axes.set_xlabel("optimizer step")
        axes.set_title(panel, fontsize=10)
        axes.grid(True, linewidth=0.3, alpha=0.5)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    handles, names = figure.axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, names, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=3, fontsize=8, frameon=False)
    return figure


def _new_figure(width: float, height: float) -> Any:
    """Return a figure without pyplot, which would look for a screen and keep the figure."""
    figures: Any = importlib.import_module("matplotlib.figure")
    return figures.Figure(figsize=(width, height))


def _roof(axes: Any, intensities: Sequence[float], peak_gflops: float, read_gbps: float) -> None:
    left, right = min(intensities) / 2, max(intensities) * 2
    corners = sorted({left, min(max(peak_gflops / read_gbps, left), right), right})
    axes.plot(corners, [min(peak_gflops, read_gbps * corner) for corner in corners], color="black", linewidth=1.2)
    _note(axes, f"{peak_gflops:,.0f} GFLOP/s", (right, peak_gflops), (0, 0), ha="right", va="bottom", fontsize=8)
    _note(axes, f"{read_gbps:.1f} GB/s", (left, read_gbps * left), (10, 0), va="center", fontsize=8)


def _note(axes: Any, text: str, place: tuple[float, float], offset: tuple[int, int], **style: Any) -> None:
    axes.annotate(text, place, xytext=offset, textcoords="offset points", **style)

"""Errors that `ktc prove` measured, as lines of a picture: for the whole model and for each block.

In: one `Measured` per comparison, and a block with its sites. Out: short lines, and whether the picture is red. Errors
of several layers become the largest one, with its layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ktc.foundation.module_paths import is_inside
from ktc.stages.pictures.dump import BlockDump
from ktc.stages.pictures.labels import printable


@dataclass(frozen=True, slots=True)
class Measured:
    """The errors of ktc and of stock in its own dtype at one module, `None` if not finite; `red` is why it fails."""

    layer: int
    site: str
    ktc: float | None
    stock: float | None
    red: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Lines about a block or a model; `red` if one of its comparisons fails."""

    lines: tuple[str, ...]
    red: bool


def of_model(measured: Sequence[Measured]) -> Verdict | None:
    """Return the summary of all comparisons, the failing ones by name; `None` without any."""
    if not measured:
        return None
    layers = {error.layer for error in measured}
    red = [error for error in measured if error.red]
    count = f"{len(layers)} layer{'s' * (len(layers) != 1)}"
    if not red:
        return Verdict((f"ktc prove: {count} compared, no error above twice stock's own",), False)
    return Verdict((f"ktc prove: RED in {count} compared", *(_failure(error, error.site) for error in red)), True)


def of_block(block: BlockDump, measured: Sequence[Measured], layer: int | None = None) -> Verdict | None:
    """Return the largest error at the block's sites, and each that fails; `None` where nothing was measured."""
    here = [error for error in measured if _at(error, block) and layer in (None, error.layer)]
    if not here:
        return None
    worst = max(here, key=lambda error: float("inf") if error.ktc is None else error.ktc)
    where = f" in layer {worst.layer}" if len({error.layer for error in here}) > 1 else ""
    summary = f"ktc prove: error {error_text(worst.ktc)}{where}, stock {error_text(worst.stock)}"
    red = [error for error in here if error.red]
    return Verdict((summary, *(_failure(error, f"layer {error.layer}") for error in red)), bool(red))


def error_text(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.1e}"


def _at(measured: Measured, block: BlockDump) -> bool:
    return any(is_inside(measured.site, site) for site in block.sites)


def _failure(measured: Measured, where: str) -> str:
    return printable(f"RED {where}: {measured.red}", 300)

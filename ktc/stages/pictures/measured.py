"""Errors that `ktc prove` measured, as lines of a picture: for the whole model and for each block.

In: one `Measured` per comparison, and a block with its sites. Out: short lines, and whether the picture is red. Errors
of several layers become the largest one, with its layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    layers = {each.layer for each in measured}
    red = [each for each in measured if each.red]
    count = f"{len(layers)} layer{'s' * (len(layers) != 1)}"
    if not red:
        return Verdict((f"ktc prove: {count} compared, no error above twice stock's own",), False)
    return Verdict((f"ktc prove: RED in {count} compared", *(_failure(each, each.site) for each in red)), True)


def of_block(block: BlockDump, measured: Sequence[Measured], layer: int | None = None) -> Verdict | None:
    """Return the largest error at the block's sites, and each that fails; `None` where nothing was measured."""
    own = [each for each in measured if _at(each, block) and layer in (None, each.layer)]
    if not own:
        return None
    worst = max(own, key=lambda each: float("inf") if each.ktc is None else each.ktc)
    where = f" in layer {worst.layer}" if len({each.layer for each in own}) > 1 else ""
    found = f"ktc prove: error {error_text(worst.ktc)}{where}, stock {error_text(worst.stock)}"
    red = [each for each in own if each.red]
    return Verdict((found, *(_failure(each, f"layer {each.layer}") for each in red)), bool(red))


def error_text(error: float | None) -> str:
    """Return an error with two digits."""
    return "not finite" if error is None else f"{error:.1e}"


def _at(measured: Measured, block: BlockDump) -> bool:
    return any(measured.site == site or measured.site.startswith(f"{site}.") for site in block.sites)


def _failure(measured: Measured, where: str) -> str:
    return printable(f"RED {where}: {measured.red}", 300)

"""Counts, sizes and paths as the commands print them.

Every command imports this module, so it imports no terminal library.
"""

from __future__ import annotations

from pathlib import Path


def count(number: int, one: str, many: str = "") -> str:
    """Return `3 rules` or `1 rule`; `many` is the plural if an s is not enough."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def size(number: float) -> str:
    """Return bytes in the unit that fits: `512.0 MiB`, `1,219.7 GiB`. GiB is the largest: memory is bought in GiB."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} GiB"


def relative(path: Path) -> Path:
    """Return the path relative to the current folder if it is inside it, otherwise unchanged."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path

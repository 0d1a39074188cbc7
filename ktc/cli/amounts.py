"""Counts, sizes and paths as the commands write them. No terminal library is imported: every command imports this."""

from __future__ import annotations

from pathlib import Path


def count(number: int, one: str, many: str = "") -> str:
    """`3 rules`, `1 rule`; `many` where an s does not do."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def size(number: float) -> str:
    """Bytes in the unit that fits, GiB at most: `512.0 MiB`, `1,219.7 GiB`; memory is bought in those."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} GiB"


def relative(path: Path) -> Path:
    """The path as seen from here, if it lies below."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path

"""The part of a page that a program renews: it stands between two marks."""

from __future__ import annotations

import sys

Marks = tuple[str, str]


def with_measured(text: str, marks: Marks, measured: str) -> str:
    """Return a page with `measured` between its marks. A page that has lost them ends the program."""
    before, _, rest = text.partition(marks[0])
    _, mark, after = rest.partition(marks[1])
    if not mark:
        sys.exit(f"a page has lost its mark `{marks[1].strip()}`")
    return f"{before}{marks[0]}\n{measured}\n{mark}{after}"

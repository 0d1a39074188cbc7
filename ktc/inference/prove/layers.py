"""The layers that are compared: the user's `0,3,10-12`. Refused: an unknown layer (N601)."""

from __future__ import annotations

import re

from ktc.diagnostics import Diagnostic, InputRefused


def chosen_layers(text: str | None, count: int) -> tuple[int, ...]:
    """Return the layer numbers in `0,3,10-12`, sorted; all for None. Raises InputRefused (N601)."""
    if text is None:
        return tuple(range(count))
    chosen: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < count:
            message = f"`--layers` has `{part.strip()}`, and the model has layers 0 to {count - 1}"
            raise InputRefused(Diagnostic("N601", message, hint="write numbers and ranges: `0,3,10-12`"))
        chosen.update(range(first, last + 1))
    return tuple(sorted(chosen))

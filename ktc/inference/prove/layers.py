"""The list of decoder layers of a model, and which of them are compared.

In: the rewrites of a manifest, the stock model, the user's `0,3,10-12`. Out: the list's name, and layer numbers.
Refused: a model whose rewrites are not in one list of layers (N602), an unknown layer (N601).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import cast

from torch import nn

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.manifest.manifest import Rewrite


def list_of_layers(model: nn.Module, rewrites: Sequence[Rewrite]) -> str:
    """Return the name of the `ModuleList` that holds every rewritten layer. Raises InputRefused (N602)."""
    modules = dict(cast("Iterator[tuple[str, nn.Module]]", model.named_modules()))
    found: dict[str, None] = {}
    for step in rewrites:
        parts = step.fqn.split(".")
        around = (".".join(parts[:count]) for count in range(1, len(parts)))
        outermost = next((path for path in around if isinstance(modules.get(path), nn.ModuleList)), None)
        if outermost is not None:
            found[outermost] = None
    if len(found) != 1:
        what = "no list of layers holds its rewrites" if not found else f"its rewrites are in {', '.join(found)}"
        raise InputRefused(not_by_layer(what))
    return next(iter(found))


def not_by_layer(what: str) -> Diagnostic:
    """Return the diagnostic (N602) about a model that cannot be run layer by layer."""
    hint = "compare whole answers instead: `ktc eval`, or `ktc.load(OUT, reference=True)` beside `ktc.load(OUT)`"
    return Diagnostic("N602", f"the model cannot be compared layer by layer: {what}", hint=hint)


def chosen_layers(text: str | None, count: int) -> tuple[int, ...]:
    """Return the layer numbers in `0,3,10-12`, sorted; all for None. Raises InputRefused (N601)."""
    if text is None:
        return tuple(range(count))
    chosen: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if not first <= last < count:
            message = f"`--layers` has `{part.strip()}`, and the model has layers 0 to {count - 1}"
            raise InputRefused(Diagnostic("N601", message, hint="write numbers and ranges: `0,3,10-12`"))
        chosen.update(range(first, last + 1))
    return tuple(sorted(chosen))

"""The file of a benchmark's `--plot`: whether it can be drawn, and its writing.

In: a path that ends in `.png` or `.svg`, and a figure of matplotlib. Refused: other endings (U030), matplotlib that is
not installed (H242), a place that cannot be written (U003).
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from ktc.diagnostics import Diagnostic, HostLacks, InputRefused
from ktc.foundation.files import refusing, replaced_file

_FORMATS = (".png", ".svg")


def require_drawable(path: Path, what: str) -> None:
    """Raise InputRefused (U030, U003) or HostLacks (H242) before anything is measured. `what` names the picture."""
    if path.suffix not in _FORMATS:
        hint = f"the ending says what is drawn: {' or '.join(_FORMATS)}"
        raise InputRefused(Diagnostic("U030", f"`--plot` cannot draw `{path.name}`", hint=hint))
    if importlib.util.find_spec("matplotlib") is None:
        hint = "`pip install 'ktc[viz]'`, or leave `--plot` out"
        raise HostLacks(Diagnostic("H242", f"{what} needs matplotlib, which is not installed", hint=hint))
    if not path.absolute().parent.is_dir():
        raise InputRefused(Diagnostic("U003", f"cannot write `{path}`: there is no such folder"))


def new_figure(width: float, height: float) -> Any:
    """Return a figure without pyplot, which would look for a screen and keep the figure."""
    figures: Any = importlib.import_module("matplotlib.figure")
    return figures.Figure(figsize=(width, height))


def write_figure(figure: Any, path: Path) -> None:
    """Write the picture atomically. Raise InputRefused (U003)."""
    matplotlib: Any = importlib.import_module("matplotlib")
    letters_stay_text = matplotlib.rc_context({"svg.fonttype": "none"})  # half the bytes
    with refusing(path), replaced_file(path) as beside, letters_stay_text:
        figure.savefig(beside, format=path.suffix[1:], bbox_inches="tight", dpi=150)

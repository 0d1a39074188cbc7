"""The place of OUT: whether a compiled model may be written there.

In: a path. Out: nothing. Refused: a name that cannot be imported (I140, I141), an existing folder (I142), a place that
cannot be written (I143).
"""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import shlex
from pathlib import Path

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.files import folder_beside
from ktc.foundation.machine_faults import failed, is_machine_fault
from ktc.model.manifest.manifest import FILE


def check_out(out: Path, force: bool = False) -> None:
    """Raise `InputRefused` for an invalid OUT: I140 not an identifier, I141 shadows a module, I142 exists, I143 place.

    `force` permits the replacement of a folder that holds a compiled model. Call this before the long work.
    """
    out = out.absolute()
    if not out.name.isidentifier() or keyword.iskeyword(out.name):
        message = f"OUT `{out.name}` is not a Python identifier, and the compiled model is a package of that name"
        raise InputRefused(Diagnostic("I140", message, hint=_try(out.with_name(_suggestion(out.name)))))
    shadowed = _importable_from(out.name)
    if shadowed is not None and not _inside(shadowed, out):
        message = f"OUT `{out.name}` would shadow the module `{out.name}` ({shadowed})"
        raise InputRefused(Diagnostic("I141", message, hint=_try(out.with_name(f"{out.name}_ktc"))))
    if os.path.lexists(out):
        _check_replaceable(out, force)
    _check_place(out.parent)


def _try(out: Path) -> str:
    return f"try `{shlex.join(['-o', str(out)])}`"


def _suggestion(name: str) -> str:
    plain = re.sub(r"\W+", "_", name).strip("_") or "compiled"
    return f"model_{plain}" if plain[0].isdigit() or keyword.iskeyword(plain) else plain


def _importable_from(name: str) -> str | None:
    """Return where `import name` would find a module, `None` if nowhere. Plain folders without code do not count."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a half imported module counts as imported
        return "imported"
    return spec.origin if spec is not None else None


def _inside(origin: str, folder: Path) -> bool:
    return Path(origin).resolve().is_relative_to(folder.resolve())


def _check_replaceable(out: Path, force: bool) -> None:
    compiled = out.is_dir() and not out.is_symlink() and (out / FILE).is_file()
    if not force:
        hint = "`--force` replaces it" if compiled else "choose another name"
        raise InputRefused(Diagnostic("I142", f"OUT `{out}` exists already", hint=hint))
    if not compiled:
        message = (
            f"OUT `{out}` exists and is not a compiled model; `--force` replaces only a folder that holds `{FILE}`"
        )
        raise InputRefused(Diagnostic("I142", message, hint="choose another name"))


def _check_place(parent: Path) -> None:
    while not os.path.lexists(parent):
        parent = parent.parent
    if not parent.is_dir():
        raise InputRefused(
            Diagnostic("I143", f"OUT cannot be made in `{parent}`, which is not a folder", hint="choose another place")
        )
    try:
        with folder_beside(parent / "ktc"):  # the file system may refuse despite permissions
            pass
    except OSError as error:
        hint = "" if is_machine_fault(error) else "choose another place, or make this one writable"
        raise failed(error, "I143", f"OUT cannot be made in `{parent}`", hint=hint) from error

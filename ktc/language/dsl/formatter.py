"""Format rule files canonically, in place. The meaning of the file and its comments are preserved."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.files import refusing, write_file
from ktc.language.dsl.loader import SUFFIX, read_text
from ktc.language.dsl.parser import parse
from ktc.language.dsl.printer import print_module


def format_text(text: str, file: str) -> str:
    """Return the canonical layout of a rule file's text. Raises InputRefused if it does not parse."""
    return print_module(parse(text, file))


def rule_files(paths: Iterable[Path]) -> list[Path]:
    """Return the given files and the `.ktr` files below the given folders.

    Raises InputRefused (E011) for a path that does not exist.
    """
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise InputRefused(Diagnostic("E011", f"the rule file `{path}` does not exist"))
        files += sorted(path.rglob(f"*{SUFFIX}")) if path.is_dir() else [path]
    return files


def format_file(path: Path, *, write: bool) -> bool:
    """Return whether the file is not canonically formatted; with `write`, replace it atomically.

    Raises InputRefused (E011, E013, syntax errors) and leaves the file unchanged.
    """
    text = read_text(path, str(path))
    try:
        wanted = format_text(text, str(path))
    except InputRefused as error:
        raise InputRefused(*error.diagnostics, sources={str(path): text}) from error
    if wanted == text:
        return False
    if write:
        with refusing(path, "E011"):
            write_file(path, wanted)
    return True

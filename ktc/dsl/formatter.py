"""Rule files to their canonical layout, in place. The text that a file means stays the same, and so do its comments."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ktc.dsl.loader import read_text
from ktc.dsl.parser import parse
from ktc.dsl.printer import print_module


def format_text(text: str, file: str) -> str:
    """The canonical layout of a rule file's text. Raises InputRefused if it does not parse."""
    return print_module(parse(text, file))


def format_file(path: Path, *, write: bool) -> bool:
    """Whether the file is not laid out canonically; if so and asked to, it is replaced at once or not at all.

    Raises InputRefused (E011, E013, syntax errors) and leaves the file alone.
    """
    text = read_text(path, str(path))
    wanted = format_text(text, str(path))
    if wanted == text:
        return False
    if write:
        _replace(path.resolve(), wanted)
    return True


def _replace(path: Path, text: str) -> None:
    mode = path.stat().st_mode
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", newline="\n", dir=path.parent, delete=False) as file:
        file.write(text)
    os.chmod(file.name, mode)
    os.replace(file.name, path)

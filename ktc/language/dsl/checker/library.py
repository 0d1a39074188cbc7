"""The patterns of the bundled library `std/`, for programs that use one without its import.

In: the name of a pattern. Out: the hint with the missing import.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Final

from ktc.foundation import resources

_PATTERN: Final = re.compile(r"^pattern (\w+)", re.MULTILINE)


@cache
def library_patterns() -> Mapping[str, tuple[str, ...]]:
    """Return the names of the patterns in each file of the library, by the name of the file."""
    files = sorted((resources.rules() / "std").glob("*.ktr"))
    return {file.name: tuple(_PATTERN.findall(file.read_text(encoding="utf-8"))) for file in files}


def missing_import(parts: tuple[str, ...], aliases: frozenset[str]) -> str:
    """Return the hint to import the pattern `alias.name` or `name`, an empty text if the library has none.

    `aliases` are the imports that the file has.
    """
    *prefix, name = parts
    for file, patterns in library_patterns().items():
        stem = file.removesuffix(".ktr")
        alias = prefix[0] if prefix else stem
        if name in patterns and alias not in aliases:
            renamed = "" if alias == stem else f" as {alias}"
            used = "" if prefix else f", and write `{stem}.{name}`"
            return f'add `import "std/{file}"{renamed}` at the top of the file{used}'
    return ""

"""The rule files of a program under the names they get in OUT/rules: in the sources of a rule set, out name -> text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ktc import resources


def rule_files(sources: Mapping[str, str]) -> dict[str, str]:
    """Bundled files keep their path below the bundled rules, the user's keep their name; a clash gets a number."""
    named: dict[str, str] = {}
    for file, text in sources.items():
        path = Path(file).absolute()
        bundled = path.is_relative_to(resources.rules())
        name = path.relative_to(resources.rules()).as_posix() if bundled else path.name
        stem, number = name.removesuffix(".ktr"), 1
        while name in named:
            number += 1
            name = f"{stem}_{number}.ktr"
        named[name] = text
    return named

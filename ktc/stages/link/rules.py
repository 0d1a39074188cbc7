"""The rule files of a program under their names in OUT/rules. In: the sources of a rule set. Out: name -> text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath


def rule_files(sources: Mapping[str, str], entry: str) -> dict[str, str]:
    """Return the files relative to the entry's folder, standard ones below `std`: OUT/rules is a program that compiles.

    `sources` and `entry` have the names that the rule loader shows. The program's location on this machine is dropped.
    """
    root = PurePosixPath(entry).parent
    paths = {shown: PurePosixPath(shown) for shown in sources}
    return {
        str(path.relative_to(root) if path.is_relative_to(root) else path): sources[shown]
        for shown, path in paths.items()
    }

"""The rule files of a program under the names they get in OUT/rules: in the sources of a rule set, out name -> text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath


def rule_files(sources: Mapping[str, str], entry: str) -> dict[str, str]:
    """The files relative to the entry's folder, the standard ones below `std`: OUT/rules is a program that compiles.

    `sources` and `entry` have the names that the rule loader shows; where the program lay on this machine is dropped.
    """
    root = PurePosixPath(entry).parent
    paths = {shown: PurePosixPath(shown) for shown in sources}
    return {
        str(path.relative_to(root) if path.is_relative_to(root) else path): sources[shown]
        for shown, path in paths.items()
    }

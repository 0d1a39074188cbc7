"""The source of ktc as syntax trees, which several tests walk."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import ktc


@cache
def trees() -> dict[str, ast.Module]:
    """The files of the ktc that is tested, by their paths. Tests call it, not their modules: parsing takes seconds."""
    package = Path(ktc.__file__).parent
    return {
        str(path.relative_to(package.parent)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(package.rglob("*.py"))
    }

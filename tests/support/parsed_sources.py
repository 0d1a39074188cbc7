"""The source of ktc as syntax trees, which several tests walk."""

from __future__ import annotations

import ast
from functools import cache

from places import ROOT


@cache
def trees() -> dict[str, ast.Module]:
    """The files of ktc by their paths in the checkout. Tests call it, not their modules: parsing takes seconds."""
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "ktc").rglob("*.py"))
    }

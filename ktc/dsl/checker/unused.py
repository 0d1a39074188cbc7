"""Warnings for what a program declares in its entry file and never uses."""

from __future__ import annotations

from ktc.dsl import syntax
from ktc.dsl.checker.names import UnitNames
from ktc.dsl.checker.report import Report
from ktc.dsl.loader import alias_of


def warn_unused(units: list[UnitNames], report: Report) -> None:
    """W050 pattern (a file without rules is a library, where that is no fault), W051 parameter, W052 import."""
    entry = units[0]
    for name, pattern in entry.patterns.items():
        if entry.rules and f"pattern {name}" not in entry.used:
            report.warning("W050", f"pattern `{name}` is never used", pattern.name.span)
    for name, param in entry.param_declarations.items():
        if f"${name}" not in entry.used:
            report.warning("W051", f"parameter `{name}` is never used", param.name.span)
    for declaration in entry.source.module.declarations:
        if not isinstance(declaration, syntax.Import):
            continue
        alias = alias_of(declaration)
        index = entry.source.imports.get(alias)
        if index is not None and f"import {alias}" not in entry.used and not units[index].rules:
            report.warning("W052", f"import `{alias}` is never used", declaration.span)

"""Warnings for unused declarations: names of the entry file, adapter defaults, budgets."""

from __future__ import annotations

from collections.abc import Mapping

from ktc.language.dsl import syntax
from ktc.language.dsl.checker.blocks import CheckedBlock
from ktc.language.dsl.checker.names import UnitNames
from ktc.language.dsl.checker.report import Report
from ktc.language.dsl.loader import alias_of
from ktc.language.dsl.ruleset import RuleDefinition
from ktc.model.targets.settings import Value


def warn_unused(
    units: list[UnitNames], rules: list[RuleDefinition], blocks: Mapping[str, CheckedBlock], report: Report
) -> None:
    """Warn of unused declarations.

    W050 pattern (except in a library, a file without rules), W051 parameter, W052 import, W056 a `lora` block without
    an adapter, W057 a budget of a device without placements.
    """
    _warn_names(units, report)
    lora = blocks["lora"].span
    if lora is not None and rules and not any(a.facet == "adapter" for rule in rules for a in rule.actions):
        report.warning("W056", "this `lora` block is never used: no rule adds an adapter", lora)
    _warn_budgets(rules, blocks["plan"], report)


def _warn_budgets(rules: list[RuleDefinition], plan: CheckedBlock, report: Report) -> None:
    """Warn of unused budgets. Unplaced nodes use the CPU, an automatic plan any device; `auto` is the first GPU."""
    if plan.values.get("auto", "none") != "none":
        return
    places = [place for rule in rules for a in rule.actions if (place := a.target.placement)]
    named: set[Value] = {device for place in places for device in (place.device, place.prefill, place.stream)}
    named |= {plan.values.get("unplaced")}
    for key, span in plan.spans.items():
        if ":" in key and key not in named and not ("auto" in named and key == "cuda:0"):
            report.warning("W057", f"the plan has a budget for {key}, but nothing is placed there", span)


def _warn_names(units: list[UnitNames], report: Report) -> None:
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

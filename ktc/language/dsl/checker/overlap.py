"""Detect two rules at one node from their text, where both selectors test path and layer on the same kind.

A path that both select is found by the product of their globs and reported with the error. All other cases (different
kinds, conditions about the model, optional captures) are decided exactly in the plan, where the matches are known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import combinations

from ktc.diagnostics import Related
from ktc.language.dsl.checker.conflicts import report_faults
from ktc.language.dsl.checker.contracts import Path, claims, contradictions
from ktc.language.dsl.checker.names import Capture, CheckedPattern, UnitNames
from ktc.language.dsl.checker.report import Report
from ktc.language.dsl.checker.selectors import selection
from ktc.language.dsl.ruleset import RuleAction, RuleDefinition
from ktc.language.dsl.shared_path import Budget, OutOfBudget, Selection, shared_path

STEPS = 100_000  # of all searches in a program together: a quarter of a second; beyond that, the plan decides


def check_overlaps(
    rules: list[RuleDefinition], patterns: Mapping[str, CheckedPattern], units: list[UnitNames], report: Report
) -> None:
    """Report every pair of rules that contradict each other, and warn of a rule that selects no path."""
    budget = Budget(STEPS)
    by_root: dict[str, list[tuple[RuleDefinition, Selection]]] = defaultdict(list)
    try:
        for rule in rules:
            selected = selection(rule, units[rule.unit].params)
            if selected is not None:
                by_root[rule.root].append((rule, selected))
                _warn_if_nowhere(rule, budget, report)
        overridden = frozenset(name for rule in rules for name in rule.overrides)
        for root, group in by_root.items():
            pairs = _Pairs(patterns.get(root), overridden, budget, report)
            for first, second in combinations(group, 2):
                pairs.check(*first, *second)
    except OutOfBudget:
        return


def _warn_if_nowhere(rule: RuleDefinition, budget: Budget, report: Report) -> None:
    if rule.except_ and shared_path((Selection(rule.at, rule.except_),), budget) is None:
        message = f"rule `{rule.name}` selects no path: `except` removes everything that `at` selects"
        report.warning("W053", message, rule.declaration.name.span)


class _Pairs:
    """Check pairs of rules that match the same thing."""

    def __init__(
        self, pattern: CheckedPattern | None, overridden: frozenset[str], budget: Budget, report: Report
    ) -> None:
        self.pattern = pattern
        self.output = pattern.declaration.outputs[0].text if pattern else ""
        self.overridden = overridden
        self.budget = budget
        self.report = report

    def check(self, first: RuleDefinition, at_first: Selection, second: RuleDefinition, at_second: Selection) -> None:
        """Report at the later rule; for two files, at the importing one, since only it can name the other rule."""
        self.budget.spend()
        if first.unit < second.unit:
            first, at_first, second, at_second = second, at_second, first, at_first
        shared = self._shared_claims(first, second)
        contracts = self._contracts(first, second)
        if not shared and not contracts:
            return
        path = shared_path((at_first, at_second), self.budget)
        if path is None:
            return
        anywhere = not (at_first.at or at_second.at)
        example = f"both match every `{first.root}`" if anywhere else f"both match, for example, `{path}`"
        for one, other in shared:
            self._report_overlap(first, second, one, other, example)
        for one, other in contracts:
            faults = contradictions(one, other, first.root, self.output)
            report_faults(faults, one, other, self.report, example)

    def _shared_claims(self, first: RuleDefinition, second: RuleDefinition) -> list[tuple[RuleAction, RuleAction]]:
        if first.name in second.overrides or second.name in first.overrides:
            return []
        return [
            (one, other)
            for one in first.actions
            for other in second.actions
            if one.facet == other.facet and self._certain(one) & self._certain(other)
        ]

    def _contracts(self, first: RuleDefinition, second: RuleDefinition) -> list[tuple[RuleAction, RuleAction]]:
        """Return the pairs that break a contract; a third rule that overrides one of the two may have removed it."""
        if first.name in self.overridden or second.name in self.overridden:
            return []
        pairs = [(one, other) for one in first.actions for other in second.actions]
        pairs += [(other, one) for one, other in pairs]
        return [pair for pair in pairs if any(contradictions(*pair, first.root, self.output))]

    def _certain(self, action: RuleAction) -> frozenset[Path]:
        """Return the captures that an action claims at every match."""
        paths = claims(action, self.pattern.name if self.pattern else "linear", self.output)
        return frozenset(path for path in paths if self._is_certain(path))

    def _is_certain(self, path: Path) -> bool:
        captures: Mapping[str, Capture] = self.pattern.captures if self.pattern else {}
        for part in path:
            capture = captures.get(part)
            if capture is None or capture.optional:
                return False
            captures = capture.members
        return True

    def _report_overlap(
        self, first: RuleDefinition, second: RuleDefinition, one: RuleAction, other: RuleAction, example: str
    ) -> None:
        message = f"rules `{first.name}` and `{second.name}` overlap on facet `{other.facet}`"
        devices = [place.device for action in (one, other) if (place := action.target.placement)]
        contradictory = len(set(devices)) == 2
        if contradictory:
            message = f"`{first.name}` places it on {devices[0]}, `{second.name}` on {devices[1]}"
        hint = f"narrow one of the paths, or write `rule {second.name} overrides {first.name}`"
        related = (Related(one.span, "also claimed here"),)
        code = "E041" if contradictory else "E040"
        self.report.error(code, message, other.span, label=example, hint=hint, related=related)

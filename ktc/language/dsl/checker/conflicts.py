"""Contradictions that are visible without a model, inside each rule and between a rule and the plan.

Two rules at one node are checked by `overlap`, and exactly by the plan, where the matches are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ktc.diagnostics import Related
from ktc.language.dsl.checker.blocks import CheckedBlock
from ktc.language.dsl.checker.contracts import Fault, Path, claims, contradictions
from ktc.language.dsl.checker.report import Report
from ktc.language.dsl.ruleset import RuleAction, RuleDefinition


def check_conflicts(
    rules: Iterable[RuleDefinition], outputs: Mapping[str, str], plan: CheckedBlock, report: Report
) -> None:
    """Report double claims, broken contracts and rewrites that the plan forbids. `outputs`: first outputs."""
    for rule in rules:
        output = outputs.get(rule.root, "")
        _check_double_claims(rule, output, report)
        for one in rule.actions:
            for other in rule.actions:
                if other is not one:
                    report_faults(contradictions(one, other, rule.root, output), one, other, report)
            _check_mode(one, plan, report)
            _check_budget(one, plan, report)


def report_faults(
    faults: Iterable[Fault], one: RuleAction, other: RuleAction, report: Report, example: str = ""
) -> None:
    """Report contradictions between two actions at the later one; `example` is a path that both match."""
    for fault in faults:
        label = "; ".join(filter(None, (fault.label, example)))
        related = (Related(one.span, fault.reason),)
        report.error(fault.code, fault.message, other.span, label=label, hint=fault.hint, related=related)


def _check_double_claims(rule: RuleDefinition, output: str, report: Report) -> None:
    claimed: dict[tuple[str, Path], RuleAction] = {}
    for action in rule.actions:
        paths = claims(action, rule.root, output)
        for path in paths:
            first = claimed.setdefault((action.facet, path), action)
            if first is not action or paths.count(path) > 1:
                what = f"`{'.'.join(path)}`" if path else "the match"
                message = f"rule `{rule.name}` claims the {action.facet} of {what} twice"
                related = (Related(first.span, "first claim"),) if first is not action else ()
                report.error("E040", message, action.span, label="second claim", related=related)
                break


def _check_mode(action: RuleAction, plan: CheckedBlock, report: Report) -> None:
    mode = plan.values.get("mode")
    if mode is None or action.target.keeps:
        return
    related = (Related(plan.spans["mode"], "said here"),)
    if mode != "train" and action.facet == "adapter":
        message = f"`{action.target.name}` trains, but the plan says `mode = {mode}`"
        report.error("E044", message, action.span, related=related)


def _check_budget(action: RuleAction, plan: CheckedBlock, report: Report) -> None:
    """Report a placement on a device whose budget is zero. A device without a budget has no limit here."""
    place = action.target.placement
    if place is not None and plan.values.get(place.device) == 0:
        message = f"this places on {place.device}, to which the plan gives no memory"
        related = (Related(plan.spans[place.device], "its budget"),)
        report.error("E041", message, action.span, related=related)

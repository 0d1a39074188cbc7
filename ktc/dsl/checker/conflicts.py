"""Contradictions that the rules show without a model: double claims, absorbed captures and placements within one rule.

Conflicts between rules are decided exactly where the matches are known, by the plan.
"""

from __future__ import annotations

from ktc.diagnostics import Related, listing
from ktc.dsl.checker.blocks import CheckedBlock
from ktc.dsl.checker.report import Report
from ktc.dsl.ruleset import RuleAction, RuleDefinition
from ktc.dsl.schema import TARGETS

_Path = tuple[str, ...]


def check_conflicts(rules: list[RuleDefinition], plan: CheckedBlock, report: Report) -> None:
    for rule in rules:
        _check_double_claims(rule, report)
        for absorbing in rule.actions:
            for other in rule.actions:
                if other is not absorbing:
                    _check_absorbed(absorbing, other, report)
                    _check_pinned(absorbing, other, report)
        if plan.values.get("mode") == "infer":
            _check_inference(rule, plan, report)


def claims(action: RuleAction) -> tuple[_Path, ...]:
    """The captures that an action claims: those it names, else those its target absorbs, else the match, `()`."""
    return action.on or tuple((name,) for name in TARGETS[action.target].absorbs) or ((),)


def _check_double_claims(rule: RuleDefinition, report: Report) -> None:
    claimed: dict[tuple[str, _Path], RuleAction] = {}
    for action in rule.actions:
        for path in claims(action):
            first = claimed.setdefault((action.facet, path), action)
            if first is not action or action.on.count(path) > 1:
                what = f"`{'.'.join(path)}`" if path else "the match"
                message = f"rule `{rule.name}` claims the {action.facet} of {what} twice"
                related = (Related(first.span, "first claim"),) if first is not action else ()
                report.error("E040", message, action.span, label="second claim", related=related)
                break


def _check_absorbed(absorbing: RuleAction, other: RuleAction, report: Report) -> None:
    """An adapter needs its capture to be a node of its own, which an absorbed capture no longer is."""
    absorbed = TARGETS[absorbing.target].absorbs
    if absorbing.on or other.facet != "adapter" or other.target == "keep":
        return
    for path in other.on:
        if len(path) == 1 and path[0] in absorbed:
            message = f"`{other.target}` on `{path[0]}`, but `{absorbing.target}` absorbs it"
            related = (Related(absorbing.span, f"`{absorbing.target}` absorbs {listing(absorbed)}"),)
            report.error("E042", message, other.span, label=f"`{path[0]}` is no longer a node", related=related)


def _check_pinned(pinning: RuleAction, other: RuleAction, report: Report) -> None:
    pins = TARGETS[pinning.target].pins
    if other.target != "place":
        return
    for path in other.on:
        device = pins.get(path[0]) if len(path) == 1 else None
        if device is not None and other.settings.get("device") not in (None, device):
            message = f"`{pinning.target}` runs `{path[0]}` on {device}, this places it on {other.settings['device']}"
            related = (Related(pinning.span, f"pinned to {device} here"),)
            report.error("E041", message, other.span, related=related)


def _check_inference(rule: RuleDefinition, plan: CheckedBlock, report: Report) -> None:
    for action in rule.actions:
        if action.facet == "adapter" and action.target != "keep":
            message = f"`{action.target}` trains, but the plan says `mode = infer`"
            report.error("E044", message, action.span, related=(Related(plan.spans["mode"], "said here"),))

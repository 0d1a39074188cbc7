"""The rewrites of a rule: known targets, complete settings, and captures of a kind the target accepts."""

from __future__ import annotations

from ktc.diagnostics import Related, Span, listing, suggest
from ktc.language.dsl import syntax
from ktc.language.dsl.checker.blocks import CheckedBlock, check_bounds
from ktc.language.dsl.checker.expressions import Expressions
from ktc.language.dsl.checker.names import Capture, UnitNames, find_capture
from ktc.language.dsl.checker.report import Report
from ktc.language.dsl.ruleset import RuleAction
from ktc.language.dsl.schema import ENUMS, SETTINGS
from ktc.language.dsl.settings import SettingSpec
from ktc.model.targets import TARGETS, Target
from ktc.model.targets.settings import Value


def check_action(
    action: syntax.Action, rule: syntax.Rule, root: Capture, unit: UnitNames, lora: CheckedBlock, report: Report
) -> RuleAction | None:
    """Return the action with all settings filled in, or `None` after reporting an invalid target or capture."""
    target = target_of(action, report)
    if target is None:
        return None
    settings = _settings(action, target, unit, lora, report)
    aliases = {rule.alias.text: root} if rule.alias else {}
    captures: list[tuple[str, ...]] = []
    for name in action.on:
        capture = find_capture(name.parts, name.span, aliases, report)
        if capture is not None:
            captures.append(name.parts[1:])
            _check_fit(action, target, capture, name.span, str(name), report)
    if not action.on:
        _check_fit(action, target, root, rule.root.span, str(rule.root), report)
    elif not captures:
        return None
    return RuleAction(target(**settings), tuple(captures), action.span)


def target_of(action: syntax.Action, report: Report) -> type[Target] | None:
    """Return the target of an action, or `None` after a report."""
    name = action.target.text
    target = TARGETS.get(name)
    if target is None:
        hint = suggest(name, TARGETS) or f"targets: {listing(TARGETS, 20)}"
        report.error("E024", f"unknown rewrite target `{name}`", action.target.span, hint=hint)
    return target


def _settings(
    action: syntax.Action, target: type[Target], unit: UnitNames, lora: CheckedBlock, report: Report
) -> dict[str, Value]:
    """Return every setting of the target: given values, then the `lora` block's (for adapters), then defaults."""
    given = _given(action, target, unit, report)
    values = {name: spec.default for name, spec in SETTINGS[target.name].items()}
    if target.fixed_facet == "adapter":
        values |= {name: lora.values[name] for name in values if name in lora.values and name != "targets"}
    values |= given
    for name, spec in SETTINGS[target.name].items():
        if spec.required and name not in given:
            message = f"`{action.target.text}` needs `{name}`"
            report.error("E031", message, action.target.span, hint=_examples(spec))
    if target.one_of and not given.keys() & {*target.one_of}:
        named = listing(target.one_of)
        report.error("E031", f"`{action.target.text}` needs one of {named}", action.target.span, hint="`place(cpu)`")
    lost = lora.span is None and unit.source.damaged  # the block may be the part that does not parse
    if "rank" in values and values["rank"] is None and "rank" not in lora.spans and not lost:
        hint = "add `lora { rank = 8 }`, or write `rank = 8` here"
        report.error("E031", f"`{action.target.text}` needs a rank", action.target.span, hint=hint)
    if "alpha" in values and values["alpha"] is None and isinstance(values["rank"], int):
        values["alpha"] = float(values["rank"])
    return values


def _given(action: syntax.Action, target: type[Target], unit: UnitNames, report: Report) -> dict[str, Value]:
    values: dict[str, Value] = {}
    specs = SETTINGS[target.name]
    names = list(specs)
    expressions = Expressions(report, unit, {})
    for index, argument in enumerate(action.arguments):
        if argument.name is None and index > 0:
            message = f"only the first setting of `{action.target.text}`, `{names[0]}`, may be given without its name"
            report.error("E025", message, argument.span, hint="write `name = value`")
            continue
        if not names:
            report.error("E025", f"`{action.target.text}` has no settings", argument.span)
            continue
        name = argument.name or names[0]
        spec = specs.get(name)
        if spec is None:
            hint = suggest(name, names) or f"settings: {listing(names)}"
            report.error("E025", f"`{action.target.text}` has no setting `{name}`", argument.span, hint=hint)
        elif name in values:
            report.error("E020", f"`{name}` is given twice", argument.span)
        else:
            values[name] = expressions.value(argument.value, spec.type)
            check_bounds(name, values[name], spec.bounds, argument.value.span, report)
    return values


def _examples(spec: SettingSpec) -> str:
    name = spec.type.element.name
    if name == "device":
        return "for example `cpu` or `cuda:0`"
    return f"one of {listing(ENUMS[name], 20)}" if name in ENUMS else f"its type is {spec.type}"


def _check_fit(
    action: syntax.Action, target: type[Target], capture: Capture, span: Span, shown: str, report: Report
) -> None:
    if "*" in target.accepts or capture.role in target.accepts or capture.kind in target.accepts:
        return
    fitting = [
        name
        for name, member in capture.members.items()
        if member.role in target.accepts or member.kind in target.accepts
    ]
    hint = f"apply it to a part of the match: {listing(fitting)}" if fitting else ""
    message = f"`{action.target.text}` rewrites {listing(target.accepts)}, `{shown}` is {capture.describe()}"
    related = (Related(span, f"this is {capture.describe()}"),)
    report.error("E035", message, action.target.span, hint=hint, related=related)

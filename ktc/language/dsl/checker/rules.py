"""Rules: root, paths, expected number of matches, and overridden rules. `actions` checks the actions."""

from __future__ import annotations

from dataclasses import replace

from ktc.diagnostics import Span, listing, suggest
from ktc.language.dsl import syntax
from ktc.language.dsl.checker.actions import check_action, target_of
from ktc.language.dsl.checker.blocks import CheckedBlock
from ktc.language.dsl.checker.expressions import Expressions
from ktc.language.dsl.checker.names import Capture, UnitNames
from ktc.language.dsl.checker.patterns import Patterns
from ktc.language.dsl.checker.report import Report
from ktc.language.dsl.globs import GlobError, compile_glob
from ktc.language.dsl.ruleset import RuleDefinition
from ktc.language.dsl.schema import FACTS, MATCHABLE
from ktc.language.dsl.types import INT, RANGE, UNKNOWN
from ktc.model.targets import LoraLinear

MAX_ACTIONS = 64  # per rule
MAX_CAPTURES = 256  # per action
LORA_TARGETS = "lora.targets"  # the rule that `lora { targets = [...] }` stands for


def check_rules(units: list[UnitNames], patterns: Patterns, lora: CheckedBlock, report: Report) -> list[RuleDefinition]:
    """Return all rules of the program, imported ones included, each with its transitive set of overridden rules."""
    rules = [
        checked
        for unit in units
        for declaration in unit.rules.values()
        if (checked := _RuleCheck(unit, patterns, lora, report).check(declaration))
    ]
    if lora.values.get("targets"):
        rules += _lora_targets(units, patterns, lora, report)
    return _resolve_overrides(rules, units, report)


class _RuleCheck:
    def __init__(self, unit: UnitNames, patterns: Patterns, lora: CheckedBlock, report: Report) -> None:
        self.unit = unit
        self.patterns = patterns
        self.lora = lora
        self.report = report

    def check(self, rule: syntax.Rule) -> RuleDefinition | None:
        """Return the checked rule, or `None` if its root is unknown."""
        if not self._within_limits(rule):
            return None
        at, except_ = self._globs(rule.at), self._globs(rule.except_)
        self._check_alias(rule)
        matched = self._root(rule)
        if matched is None:
            for action in rule.actions:
                target_of(action, self.report)
            return None
        name, root = matched
        aliases = {rule.alias.text: root} if rule.alias else {}
        expressions = Expressions(self.report, self.unit, aliases)
        if rule.where is not None:
            expressions.condition(rule.where)
        if rule.expect is not None:
            self._check_expect(rule.expect)
        actions = (check_action(action, rule, root, self.unit, self.lora, self.report) for action in rule.actions)
        return RuleDefinition(
            name=self.unit.source.prefix + rule.name.text,
            unit=self.unit.source.index,
            declaration=rule,
            root=name,
            at=at,
            except_=except_,
            overrides=frozenset(),
            actions=tuple(action for action in actions if action),
        )

    def _within_limits(self, rule: syntax.Rule) -> bool:
        crowded = next((action for action in rule.actions if len(action.on) > MAX_CAPTURES), None)
        if len(rule.actions) > MAX_ACTIONS:
            self.report.error("E013", f"a rule has at most {MAX_ACTIONS} rewrites", rule.name.span)
        elif crowded is not None:
            self.report.error("E013", f"a rewrite names at most {MAX_CAPTURES} captures", crowded.span)
        else:
            return True
        return False

    def _root(self, rule: syntax.Rule) -> tuple[str, Capture] | None:
        parts = rule.root.parts
        if len(parts) == 1 and parts[0] in MATCHABLE and parts[0] not in self.unit.patterns:
            if parts[0] == "module" and not rule.at:
                hint = 'for example `match module at "model"`'
                self.report.error(
                    "E031", "`match module` needs `at`: a module is known by its path only", rule.root.span, hint=hint
                )
            kind = MATCHABLE[parts[0]]
            return parts[0], Capture(kind)
        pattern = self.patterns.find(self.unit, parts, rule.root.span, "pattern")
        return (pattern.name, pattern.as_capture()) if pattern else None

    def _check_alias(self, rule: syntax.Rule) -> None:
        if rule.alias is not None and rule.alias.text in FACTS:
            message = f"`{rule.alias.text}` already denotes facts about the {rule.alias.text}"
            self.report.error("E020", message, rule.alias.span, hint="choose another name")

    def _check_expect(self, expect: syntax.Expect) -> None:
        expressions = Expressions(self.report, self.unit, {}, conditions=True)
        inferred = expressions.infer(expect.count, INT)
        if inferred == RANGE and expect.operator != "==":
            message = f"`{expect.operator}` compares with one number, found a range"
            self.report.error("E030", message, expect.count.span)
        elif inferred not in (INT, RANGE, UNKNOWN):
            self.report.error("E030", f"expected a number of matches, found {inferred}", expect.count.span)

    def _globs(self, texts: tuple[syntax.Text, ...]) -> tuple[str, ...]:
        for text in texts:
            try:
                compile_glob(text.value)
            except GlobError as error:
                hint = "`*` is one segment, `**` any number, `{a,b}` a choice, `[3..60]` an integer segment"
                self.report.error("E030", f"bad path glob: {error}", _inside(text.span, error), hint=hint)
        return tuple(text.value for text in texts)


def _inside(span: Span, error: GlobError) -> Span:
    """Return the position inside a quoted string, or the whole string if it has escapes.

    Valid characters of globs are never escaped; a faulty one may be.
    """
    start = span.column + 1 + error.offset
    stop = start + error.length
    return replace(span, column=start, end_column=stop) if stop < span.end_column else span


def _lora_targets(
    units: list[UnitNames], patterns: Patterns, lora: CheckedBlock, report: Report
) -> list[RuleDefinition]:
    """Return the rule that `lora { targets = [globs] }` abbreviates."""
    targets = lora.values["targets"]
    span = lora.spans["targets"]
    assert isinstance(targets, tuple), "targets is a list of globs"
    rule = syntax.Rule(
        name=syntax.Name(LORA_TARGETS, span=span),
        overrides=(),
        root=syntax.QualifiedName(("linear",), span=span),
        alias=None,
        at=tuple(syntax.Text(str(glob), span=span) for glob in targets),
        except_=(),
        where=None,
        expect=None,
        actions=(syntax.Action(syntax.Name(LoraLinear.name, span=span), (), (), span=span),),
        span=span,
    )
    checked = _RuleCheck(units[lora.unit], patterns, lora, report).check(rule)
    return [replace(checked, name=LORA_TARGETS)] if checked else []


def _resolve_overrides(rules: list[RuleDefinition], units: list[UnitNames], report: Report) -> list[RuleDefinition]:
    known = {rule.name for rule in rules}
    declared = {unit.source.prefix + name for unit in units for name in unit.rules}
    direct = {rule.name: _direct_overrides(rule, units, known, declared, report) for rule in rules}
    resolved: list[RuleDefinition] = []
    for rule in rules:
        reached = _reachable(rule.name, direct)
        if rule.name in reached:
            report.error("E027", f"rule `{rule.name}` overrides itself in a cycle", rule.declaration.name.span)
        resolved.append(replace(rule, overrides=frozenset(reached - {rule.name})))
    return resolved


def _direct_overrides(
    rule: RuleDefinition, units: list[UnitNames], known: set[str], declared: set[str], report: Report
) -> frozenset[str]:
    unit = units[rule.unit]
    losers: set[str] = set()
    for loser in rule.declaration.overrides:
        unit.used.add(f"import {loser.parts[0]}")
        prefix = unit.source.prefix
        name = LORA_TARGETS if str(loser) == LORA_TARGETS else prefix + str(loser)
        if name in known:
            losers.add(name)
        elif name not in declared and not _may_be_lost(loser.parts, unit, units):
            here = sorted(other.removeprefix(prefix) for other in declared if other.startswith(prefix))
            hint = suggest(str(loser), here) or f"rules: {listing(here)}"
            report.error("E027", f"`overrides` names an unknown rule `{loser}`", loser.span, hint=hint)
    return frozenset(losers)


def _may_be_lost(parts: tuple[str, ...], unit: UnitNames, units: list[UnitNames]) -> bool:
    """Return whether an unknown name may be declared in a file that could not be read."""
    imported = unit.source.imports.get(parts[0])
    owner = unit if imported is None else units[imported]
    return owner.source.damaged or parts[0] in unit.source.broken_imports


def _reachable(start: str, direct: dict[str, frozenset[str]]) -> set[str]:
    reached: set[str] = set()
    todo = list(direct[start])
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += direct[name]
    return reached

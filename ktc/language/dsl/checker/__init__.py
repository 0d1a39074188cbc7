"""Static semantics of a rule program: names, types, roles, targets, settings and conflicts inside a rule.

Input: the loaded files and the `--set` values. Output: a `RuleSet`. The errors of all files are reported together.
The check is independent of model and host.
"""

from __future__ import annotations

from collections.abc import Mapping

from ktc.diagnostics import InputRefused
from ktc.language.dsl import syntax
from ktc.language.dsl.checker.blocks import check_blocks
from ktc.language.dsl.checker.conflicts import check_conflicts
from ktc.language.dsl.checker.expressions import Expressions
from ktc.language.dsl.checker.names import UnitNames, collect
from ktc.language.dsl.checker.overlap import check_overlaps
from ktc.language.dsl.checker.params import bind_params
from ktc.language.dsl.checker.patterns import Patterns
from ktc.language.dsl.checker.report import Report, TooManyErrors, in_order
from ktc.language.dsl.checker.rules import check_rules
from ktc.language.dsl.checker.selectors import asks_the_model, is_switched_off
from ktc.language.dsl.checker.unused import warn_unused
from ktc.language.dsl.evaluate import constant
from ktc.language.dsl.loader import Program
from ktc.language.dsl.ruleset import PatternDefinition, RuleSet, Unit


def check(program: Program, settings: Mapping[str, str]) -> RuleSet:
    """Return the checked program. Raises InputRefused with the diagnostics of all files, including the loader's."""
    report = Report(program.diagnostics)
    try:
        return _check(program, settings, report)
    except TooManyErrors:
        raise InputRefused(*in_order(report.errors), sources=program.sources) from None


def _check(program: Program, settings: Mapping[str, str], report: Report) -> RuleSet:
    units = [collect(source, report) for source in program.units]
    bind_params(units, settings, report)
    patterns = Patterns(units, report)
    patterns.check_all()
    blocks = check_blocks(units, report)
    requires = _check_requires(units, report)
    every = check_rules(units, patterns, blocks["lora"], report)
    rules = [rule for rule in every if not is_switched_off(rule, units[rule.unit].params)]
    known = {pattern.name: pattern for pattern in patterns.checked.values() if pattern}
    outputs = {name: pattern.declaration.outputs[0].text for name, pattern in known.items()}
    check_conflicts(rules, outputs, blocks["plan"], report)
    check_overlaps(rules, known, units, report)
    if report.errors:
        raise InputRefused(*in_order(report.errors), sources=program.sources)
    warn_unused(units, every, blocks, report)
    return RuleSet(
        entry=units[0].source.module.file,
        units=tuple(Unit(unit.source.module, unit.source.prefix, unit.source.imports, unit.params) for unit in units),
        patterns={name: PatternDefinition(name, pattern.unit, pattern.declaration) for name, pattern in known.items()},
        rules=tuple(rules),
        requires=requires,
        plan=blocks["plan"].values,
        lora=blocks["lora"].values,
        settings=dict(settings),
        sources=program.sources,
        warnings=in_order(report.warnings),
    )


def _check_requires(units: list[UnitNames], report: Report) -> tuple[tuple[int, syntax.Require], ...]:
    requires = [
        (unit, declaration)
        for unit in units
        for declaration in unit.source.module.declarations
        if isinstance(declaration, syntax.Require)
    ]
    for unit, declaration in requires:
        Expressions(report, unit, {}).condition(declaration.condition)
        _check_params(unit, declaration, report)
    return tuple((unit.source.index, declaration) for unit, declaration in requires)


def _check_params(unit: UnitNames, require: syntax.Require, report: Report) -> None:
    """Report (M063) a requirement over parameters alone that their values do not meet."""
    used = [part.name for part in syntax.walk(require.condition) if isinstance(part, syntax.ParamReference)]
    values = {f"${name}": unit.params.get(name) for name in used}
    if report.errors or asks_the_model(require.condition):
        return
    if constant(require.condition, unit.params) is not True:
        reason = f": {require.message.value}" if require.message else ""
        shown = ", ".join(f"`{name}` is `{str(value).lower()}`" for name, value in values.items())
        report.error("M063", f"requirement not met{reason}", require.condition.span, label=shown)

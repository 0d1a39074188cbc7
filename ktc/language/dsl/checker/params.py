"""Assign types and values to parameters: `--set` overrides the importer's `with`, which overrides the default.

Every value is checked against the declared type and, if there is one, the declared domain.
"""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

from ktc.diagnostics import Diagnostic, InputRefused, Related, Span, listing, suggest
from ktc.language.dsl import syntax
from ktc.language.dsl.checker.expressions import Expressions
from ktc.language.dsl.checker.names import UnitNames
from ktc.language.dsl.checker.report import Report
from ktc.language.dsl.evaluate import constant
from ktc.language.dsl.parser import parse_value
from ktc.language.dsl.schema import PARAM_TYPES
from ktc.language.dsl.types import RANGE, STRING, UNKNOWN, Type
from ktc.model.targets.settings import Value


def bind_params(units: list[UnitNames], settings: Mapping[str, str], report: Report) -> None:
    """Fill `param_types` and `params` of every unit, importers first. Report unknown settings and arguments."""
    for unit in units:
        for declaration in _by_need(unit.param_declarations):
            _Binding(unit, units, settings, declaration, report).bind()
        _refuse_unknown_arguments(unit, report)
    _refuse_unknown_settings(units, settings, report)


def _by_need(declarations: Mapping[str, syntax.Param]) -> list[syntax.Param]:
    """Return the parameters after those in their default and domain. Cycles keep the order of declaration."""
    needs = {
        name: _named(declaration.default) | (_named(declaration.domain) if declaration.domain else set[str]())
        for name, declaration in declarations.items()
    }
    try:
        order = [*TopologicalSorter(needs).static_order()]
    except CycleError:
        order = [*declarations]
    return [declarations[name] for name in order if name in declarations]


def _named(expression: syntax.Expression) -> set[str]:
    return {part.name for part in syntax.walk(expression) if isinstance(part, syntax.ParamReference)}


class _Binding:
    """One parameter during the assignment of its value."""

    def __init__(
        self, unit: UnitNames, units: list[UnitNames], settings: Mapping[str, str], declaration: syntax.Param,
        report: Report,
    ) -> None:  # fmt: skip
        self.unit, self.units, self.declaration, self.report = unit, units, declaration, report
        self.name = declaration.name.text
        self.key = unit.source.prefix + self.name
        self.setting = settings.get(self.key)
        self.type = declared_type(declaration.type, report)

    def bind(self) -> None:
        value, span = self._constant(self.declaration.default, self.unit), self.declaration.default.span
        argument = next((given for given in self.unit.source.arguments if given.name == self.name), None)
        if argument is not None and self.unit.source.importer is not None:
            value, span = self._constant(argument.value, self.units[self.unit.source.importer]), argument.value.span
        if self.setting is not None:
            value, span = self._from_setting(self.setting), self.declaration.name.span
        self._check_domain(value, span)
        self.unit.param_types[self.name] = self.type
        self.unit.params[self.name] = value

    def _constant(self, expression: syntax.Expression, unit: UnitNames) -> Value:
        return Expressions(self.report, unit, {}).value(expression, self.type)

    def _from_setting(self, text: str) -> Value:
        if self.type == STRING:
            return text
        attempt = Report()
        try:
            value = Expressions(attempt, self.unit, {}).value(parse_value(text, "--set"), self.type)
        except InputRefused as error:
            attempt.errors += error.diagnostics
        else:
            if not attempt.errors:
                return value
        self._refuse_setting(text, attempt.errors[0])
        return None

    def _refuse_setting(self, text: str, fault: Diagnostic) -> None:
        message = f"--set {self.key}={text}: {fault.message}"
        span = self.declaration.name.span
        self.report.error(fault.code, message, span, label=f"declared as {self.type}", hint=fault.hint)

    def _check_domain(self, value: Value, span: Span) -> None:
        domain = self.declaration.domain
        if domain is None:
            return
        expressions = Expressions(self.report, self.unit, {})
        listed = Type(self.type.name, "list")
        inferred = expressions.infer(domain, listed)
        if inferred == RANGE and not self.type.is_number:
            self.report.error("E030", f"a range cannot bound a {self.type}", domain.span)
            return
        if inferred != RANGE and (inferred == UNKNOWN or expressions.check(domain, listed) == UNKNOWN):
            return
        allowed = constant(domain, self.unit.params)
        related = (Related(domain.span, "declared here"),)
        if isinstance(allowed, range) and isinstance(value, int | float):
            if not allowed.start <= value <= allowed.stop - 1:
                message = f"`{self.key}` = {value} is outside {allowed.start}..{allowed.stop - 1}"
                self.report.error("E032", message, span, related=related)
        elif isinstance(allowed, tuple) and value is not None:
            outside = [item for item in (value if isinstance(value, tuple) else (value,)) if item not in allowed]
            if outside:
                message = f"`{self.key}` = {outside[0]} is not one of {listing(map(str, allowed))}"
                self.report.error("E032", message, span, related=related)


def declared_type(declared: syntax.TypeName, report: Report) -> Type:
    """Return the type that a parameter's declaration names; `UNKNOWN` after a report."""
    name, element = declared.name, declared.element
    if element is not None and name.text != "list":
        report.error("E030", f"`{name.text}` takes no element type", element.span, hint=f"write `list[{element.text}]`")
        return UNKNOWN
    if element is None and name.text == "list":
        report.error("E030", "`list` needs an element type", name.span, hint="for example `list[isa]`")
        return UNKNOWN
    inner = element or name
    if inner.text not in PARAM_TYPES:
        hint = suggest(inner.text, PARAM_TYPES) or f"types: {listing(PARAM_TYPES, 40)}"
        report.error("E030", f"unknown type `{inner.text}`", inner.span, hint=hint)
        return UNKNOWN
    return Type(inner.text, "list" if element is not None else "one")


def _refuse_unknown_arguments(unit: UnitNames, report: Report) -> None:
    seen: set[str] = set()
    for argument in unit.source.arguments:
        if argument.name is None:
            report.error("E022", "parameters are given by name", argument.span, hint="write `with (name = value)`")
        elif argument.name not in unit.param_declarations and not unit.source.damaged:
            message = f"`{unit.source.module.file}` has no parameter `{argument.name}`"
            hint = suggest(argument.name, unit.param_declarations) or f"parameters: {listing(unit.param_declarations)}"
            report.error("E022", message, argument.span, hint=hint)
        elif argument.name in seen:
            report.error("E020", f"`{argument.name}` is given twice", argument.span)
        seen.add(argument.name or "")


def _refuse_unknown_settings(units: list[UnitNames], settings: Mapping[str, str], report: Report) -> None:
    if any(unit.source.broken_imports or unit.source.damaged for unit in units):
        return  # the parameter may be declared in the unreadable file
    known = [unit.source.prefix + name for unit in units for name in unit.param_declarations]
    for key in settings:
        if key not in known:
            hint = suggest(key, known) or f"parameters: {listing(known)}"
            report.error("E028", f"--set {key}: there is no such parameter", None, hint=hint)

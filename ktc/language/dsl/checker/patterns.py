"""Patterns: names are bound before use, operators and attributes are known, everything contributes to the outputs.

A capture is certain if it is reached from the first output through every choice of alternatives, otherwise optional.
Calling a pattern inlines it, so recursion is refused and patterns are finite.
"""

from __future__ import annotations

from dataclasses import replace

from ktc.diagnostics import Related, Span, listing, suggest
from ktc.language.dsl import syntax
from ktc.language.dsl.checker.bindings import VALUE, Bound, common, union
from ktc.language.dsl.checker.expressions import Expressions
from ktc.language.dsl.checker.library import missing_import
from ktc.language.dsl.checker.names import Capture, CheckedPattern, UnitNames
from ktc.language.dsl.checker.report import Report
from ktc.language.dsl.checker.roles import check_role
from ktc.language.dsl.schema import OPERATORS, Operator

MAX_BINDINGS = 256  # of a pattern
MAX_PATTERN_DEPTH = 32  # of patterns that call patterns

_NO_PATTERNS = 'this file has no patterns: import some, for example `import "std/moe.ktr"`'


class Patterns:
    """All patterns of a program, each checked once and on demand."""

    def __init__(self, units: list[UnitNames], report: Report) -> None:
        self.units = units
        self.report = report
        self.checked: dict[tuple[int, str], CheckedPattern | None] = {}  # `None`: in progress, or refused
        self.depth = 0

    def check_all(self) -> None:
        for unit in self.units:
            for name, declaration in unit.patterns.items():
                if name in OPERATORS:
                    message = f"pattern `{name}` hides the operator of that name"
                    self.report.error("E020", message, declaration.name.span, hint="choose another name")
                self._check(unit, declaration)

    def find(self, unit: UnitNames, parts: tuple[str, ...], span: Span, what: str) -> CheckedPattern | None:
        """Return the pattern that `name` or `alias.name` denotes in a unit, or report that no such `what` exists."""
        if len(parts) == 1 and parts[0] in unit.patterns:
            unit.used.add(f"pattern {parts[0]}")
            return self._check(unit, unit.patterns[parts[0]], span)
        if len(parts) == 2 and parts[0] in unit.source.imports:
            unit.used.add(f"import {parts[0]}")
            other = self.units[unit.source.imports[parts[0]]]
            if parts[1] in other.patterns:
                return self._check(other, other.patterns[parts[1]], span)
            if other.source.damaged:
                return None
        elif parts[0] in unit.source.broken_imports or unit.source.damaged:
            return None
        self._unknown(unit, parts, span, what)
        return None

    def _unknown(self, unit: UnitNames, parts: tuple[str, ...], span: Span, what: str) -> None:
        imported = [
            f"{alias}.{name}" for alias, index in unit.source.imports.items() for name in self.units[index].patterns
        ]
        options = [*unit.patterns, *imported]
        spelling = ".".join(parts)
        close = suggest(spelling, [*options, *OPERATORS])
        same_name = [option for option in imported if option.rpartition(".")[2] == parts[-1]]
        hint = f"did you mean `{same_name[0]}`?" if same_name else ""
        hint = hint or missing_import(parts, frozenset(unit.source.imports)) or close
        hint = hint or (f"patterns: {listing(options)}" if options else _NO_PATTERNS)
        self.report.error("E021", f"unknown {what} `{spelling}`", span, hint=hint)

    def _check(self, unit: UnitNames, declaration: syntax.Pattern, span: Span | None = None) -> CheckedPattern | None:
        key = (unit.source.index, declaration.name.text)
        if key in self.checked:
            checked = self.checked[key]
            if checked is None and span is not None:
                message = f"pattern `{declaration.name.text}` contains itself"
                self.report.error("E036", message, span, related=(Related(declaration.name.span, "declared here"),))
            return checked
        self.checked[key] = None
        if not self._within_limits(declaration):
            return None
        self.depth += 1
        captures = _PatternCheck(self, unit, declaration).captures()
        self.depth -= 1
        pattern = CheckedPattern(unit.source.prefix + declaration.name.text, unit.source.index, declaration, captures)
        self.checked[key] = pattern
        return pattern

    def _within_limits(self, declaration: syntax.Pattern) -> bool:
        if len(declaration.bindings) > MAX_BINDINGS:
            message = f"a pattern has at most {MAX_BINDINGS} bindings"
        elif self.depth >= MAX_PATTERN_DEPTH:
            message = f"patterns call each other deeper than {MAX_PATTERN_DEPTH}"
        else:
            return True
        self.report.error("E013", message, declaration.name.span)
        return False


class _PatternCheck:
    def __init__(self, patterns: Patterns, unit: UnitNames, declaration: syntax.Pattern) -> None:
        self.patterns = patterns
        self.report = patterns.report
        self.unit = unit
        self.declaration = declaration
        self.bound: dict[str, Bound] = {}

    def captures(self) -> dict[str, Capture]:
        """Return every bound name with its capture, after reporting the faults of the pattern."""
        for name in self.declaration.inputs:
            self._bind(name, Bound(VALUE, name.span, frozenset({name.text}), frozenset({name.text})))
        for binding in self.declaration.bindings:
            self._check_binding(binding)
        if self._outputs_are_bound():
            self._check_contribution()
            self._mark_optional()
        captures = {name: bound.capture for name, bound in self.bound.items()}
        if self.declaration.role is not None:
            check_role(self.declaration, self.declaration.role, self.bound, self.report)
        return captures

    # Bindings --------------------------------------------------------------------------------------------------------
    def _check_binding(self, binding: syntax.Binding) -> None:
        captures = self._captures_of(binding.term, len(binding.names))
        siblings = frozenset(name.text for name in binding.names if name.text != "_")
        needs_any, needs_all = self._needs(binding.term)
        for name, capture in zip(binding.names, captures, strict=True):
            if name.text != "_":
                self._bind(name, Bound(capture, binding.span, needs_any | siblings, needs_all | siblings))

    def _bind(self, name: syntax.Name, bound: Bound) -> None:
        first = self.bound.setdefault(name.text, bound)
        if first is not bound:
            hint = "a name is bound once; write alternatives as `a | b`"
            self.report.error("E020", f"`{name.text}` is bound twice", name.span, hint=hint)

    def _captures_of(self, term: syntax.Term, results: int) -> list[Capture]:
        """Return the captures of the names on the left of a binding."""
        if results == 1:
            return [self._term(term, 1)]
        whole = self._term(term, results)
        if whole.pattern is None:
            return [VALUE] * results
        outputs = whole.pattern.declaration.outputs
        if len(outputs) != results:
            counted = _counted(len(outputs), "output")
            message = f"pattern `{whole.pattern.name}` has {counted}, {results} names are bound"
            self.report.error("E025", message, term.span)
            return [VALUE] * results
        return [whole.members.get(output.text, VALUE) for output in outputs]

    def _needs(self, term: syntax.Term) -> tuple[frozenset[str], frozenset[str]]:
        """Return the names that a term depends on: in any of its alternatives, and in all of them."""
        match term:
            case syntax.Use():
                bound = self.bound.get(term.parts[0])
                return (bound.any, bound.all) if bound else (frozenset(), frozenset())
            case syntax.Wildcard():
                return frozenset(), frozenset()
            case syntax.Call():
                needs = [self._needs(operand) for operand in term.operands]
                return union(some for some, _ in needs), union(every for _, every in needs)
            case syntax.Alternatives():
                needs = [self._needs(choice) for choice in term.choices]
                certain = set[str](needs[0][1]).intersection(*(every for _, every in needs))
                return union(some for some, _ in needs), frozenset(certain)
            case syntax.Maybe(term=syntax.Call(operands=(first, *others))):
                some, every = self._needs(first)
                return union([some, *(self._needs(operand)[0] for operand in others)]), every
            case syntax.Maybe():
                return self._needs(term.term)

    # Terms -----------------------------------------------------------------------------------------------------------
    def _term(self, term: syntax.Term, results: int = 1) -> Capture:
        """Return the capture of a term. `results` is the number of names bound to it."""
        match term:
            case syntax.Wildcard():
                return VALUE
            case syntax.Use():
                return self._use(term, results)
            case syntax.Call():
                return self._call(term, results)
            case syntax.Alternatives():
                return common([self._term(choice, results) for choice in term.choices])
            case syntax.Maybe(term=syntax.Call(operands=(first, *_)) as call):
                return common([self._term(call, results), self._known(first)])
            case syntax.Maybe():
                self._term(term.term)
                hint = "`f(a)?` means `f(a)`, or `a` alone"
                self.report.error("E037", "`?` follows a call with an operand", term.span, hint=hint)
                return VALUE

    def _use(self, use: syntax.Use, results: int) -> Capture:
        if results > 1:
            self.report.error("E025", f"`{'.'.join(use.parts)}` is one value, {results} names are bound", use.span)
        bound = self.bound.get(use.parts[0])
        if bound is None:
            self._unbound(use)
            return VALUE
        capture = bound.capture
        for index, part in enumerate(use.parts[1:], start=1):
            member = capture.members.get(part)
            if member is None:
                owner = ".".join(use.parts[:index])
                hint = suggest(part, capture.members) or f"captures of `{owner}`: {listing(capture.members)}"
                self.report.error("E023", f"`{owner}` has no capture `{part}`", use.span, hint=hint)
                return VALUE
            capture = member
        return capture

    def _known(self, term: syntax.Term) -> Capture:
        """Return the capture of an operand that has already been checked."""
        if isinstance(term, syntax.Use) and len(term.parts) == 1 and term.parts[0] in self.bound:
            return self.bound[term.parts[0]].capture
        return VALUE

    def _unbound(self, use: syntax.Use) -> None:
        name = use.parts[0]
        later = any(name == bound.text for binding in self.declaration.bindings for bound in binding.names)
        what = "is used before it is bound" if later else "is not bound in this pattern"
        hint = "" if later else suggest(name, self.bound)
        if name in OPERATORS and not later:
            hint = f"an operator is applied: `{name}(...)`"
        self.report.error("E023", f"`{name}` {what}", use.span, hint=hint)

    def _call(self, call: syntax.Call, results: int) -> Capture:
        for operand in call.operands:
            self._term(operand)
        if len(call.callee) == 1 and call.callee[0] in OPERATORS:
            operator = OPERATORS[call.callee[0]]
            self._check_every(call)
            self._check_operands(call, operator, results)
            self._check_attributes(call, operator)
            return Capture(operator.kind)
        pattern = self.patterns.find(self.unit, call.callee, call.span, "operator or pattern")
        if pattern is None:
            return VALUE
        self._check_pattern_call(call, pattern)
        return pattern.as_capture()

    def _check_every(self, call: syntax.Call) -> None:
        """Report `every` of a term that is not the name of one value: it binds that name to all that fit."""
        if call.callee[0] != "every" or not call.operands:
            return
        operand = call.operands[0]
        if not isinstance(operand, syntax.Use) or len(operand.parts) > 1 or self._known(operand).pattern is not None:
            hint = "write `parts = linear(_)`, then `every(parts)`"
            self.report.error("E025", "`every` takes the name of a binding that is an operator", call.span, hint=hint)

    def _check_operands(self, call: syntax.Call, operator: Operator, results: int) -> None:
        fewest, most = operator.operands
        if len(call.operands) < fewest or (most is not None and len(call.operands) > most):
            exact = _counted(fewest, "operand")
            wanted = exact if fewest == most else f"{fewest} to {most or 'any number of'} operands"
            message = f"`{call.callee[0]}` takes {wanted}, found {len(call.operands)}"
            self.report.error("E025", message, call.span)
        if operator.results is not None and results > operator.results:
            message = f"`{call.callee[0]}` has {_counted(operator.results, 'result')}, {results} names are bound"
            self.report.error("E025", message, call.span)

    def _check_attributes(self, call: syntax.Call, operator: Operator) -> None:
        expressions = Expressions(self.report, self.unit, {})
        for attribute in call.attributes:
            name = attribute.name or ""
            if name in operator.attributes:
                expressions.check(attribute.value, operator.attributes[name])
            else:
                hint = suggest(name, operator.attributes) or f"attributes: {listing(operator.attributes)}"
                self.report.error("E025", f"`{call.callee[0]}` has no attribute `{name}`", attribute.span, hint=hint)

    def _check_pattern_call(self, call: syntax.Call, pattern: CheckedPattern) -> None:
        inputs = len(pattern.declaration.inputs)
        if len(call.operands) != inputs:
            wanted = _counted(inputs, "operand")
            message = f"pattern `{pattern.name}` takes {wanted}, found {len(call.operands)}"
            self.report.error("E025", message, call.span)
        for attribute in call.attributes:
            self.report.error("E025", f"pattern `{pattern.name}` takes no attributes", attribute.span)

    # The pattern as a whole ------------------------------------------------------------------------------------------
    def _outputs_are_bound(self) -> bool:
        missing = [output for output in self.declaration.outputs if output.text not in self.bound]
        for output in missing:
            hint = suggest(output.text, self.bound)
            self.report.error("E023", f"output `{output.text}` is never bound", output.span, hint=hint)
        return not missing

    def _check_contribution(self) -> None:
        outputs = self.declaration.outputs
        reached = union(self.bound[output.text].any for output in outputs)
        related = (Related(outputs[0].span, "not needed for this"),)
        for binding in self.declaration.bindings:
            names = [name.text for name in binding.names if name.text != "_"]
            if not reached.intersection(names):
                shown = names[0] if names else "_"
                self.report.error(
                    "E037", f"`{shown}` does not contribute to the outputs", binding.span, related=related
                )
        for name in self.declaration.inputs:
            if name.text not in reached:
                self.report.error("E037", f"input `{name.text}` is never used", name.span)
        for output in outputs[1:]:
            if output.text not in self.bound[outputs[0].text].all:
                message = f"output `{output.text}` is not always present when `{outputs[0].text}` matches"
                self.report.error("E037", message, output.span)

    def _mark_optional(self) -> None:
        certain = self.bound[self.declaration.outputs[0].text].all
        for name, bound in self.bound.items():
            bound.capture = replace(bound.capture, optional=name not in certain)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

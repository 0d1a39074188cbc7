"""Types of expressions. `Expressions.check` reports each fault once and returns `UNKNOWN` for a faulty expression.

A bare word is an enum constant; its type comes from the context. Facts and attributes of the match are available in
conditions only; all other expressions are constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ktc.diagnostics import listing, suggest
from ktc.language.dsl import syntax
from ktc.language.dsl.checker.names import Capture, UnitNames, find_capture
from ktc.language.dsl.checker.report import Report
from ktc.language.dsl.evaluate import constant
from ktc.language.dsl.printer import print_expression
from ktc.language.dsl.schema import CAPTURE_ATTRIBUTES, ENUMS, FACTS, RETIRED
from ktc.language.dsl.types import BOOL, EMPTY_LIST, FLOAT, INT, RANGE, SIZE, STRING, UNKNOWN, Type, convert, fits
from ktc.model.targets.settings import Value

_ORDERINGS = ("<", "<=", ">", ">=")
_Guard = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Expressions:
    """Check expressions of one unit. `aliases` are the matches in scope; `conditions` allows facts and attributes."""

    report: Report
    unit: UnitNames
    aliases: Mapping[str, Capture]
    conditions: bool = False
    guards: frozenset[_Guard] = frozenset()

    def condition(self, expression: syntax.Expression) -> None:
        """Check a condition. A capture guarded by `m has x` anywhere in it may be absent without a warning."""
        guarded = Expressions(self.report, self.unit, self.aliases, True, frozenset(_guards(expression)))
        guarded.check(expression, BOOL)

    def check(self, expression: syntax.Expression, wanted: Type) -> Type:
        """Return the expression's type, after checking that it is accepted as `wanted`."""
        inferred = self.infer(expression, wanted)
        if fits(inferred, wanted):
            return inferred
        shown = "a condition" if wanted == BOOL else str(wanted)
        hint = ""
        if wanted.element.name in ENUMS and isinstance(expression, syntax.Literal) and expression.type == "string":
            hint = "constants are bare words, without quotes"
        self.report.error(
            "E030", f"expected {shown}, found {inferred}", expression.span, label=f"this is {inferred}", hint=hint
        )
        return UNKNOWN

    def value(self, expression: syntax.Expression, wanted: Type) -> Value:
        """Return the value of a constant expression in the form of its type; `None` after a report."""
        if self.check(expression, wanted) == UNKNOWN:
            return None
        result = constant(expression, self.unit.params)
        value = None if isinstance(result, range) else convert(result, wanted)
        undefined = value is None or (isinstance(value, tuple) and None in value)
        if undefined and not self._needs_faulty(expression):
            hint = "it divides by zero, or leaves the range of 64-bit numbers"
            self.report.error("E032", "this expression has no value", expression.span, hint=hint)
        return None if undefined else value

    def _needs_faulty(self, expression: syntax.Expression) -> bool:
        """Return whether the expression uses a parameter whose fault has been reported."""
        used = (part.name for part in syntax.walk(expression) if isinstance(part, syntax.ParamReference))
        return any(self.unit.params.get(name) is None for name in used)

    def infer(self, expression: syntax.Expression, wanted: Type | None = None) -> Type:
        """Return the expression's type; `wanted` only resolves its bare words."""
        match expression:
            case syntax.Literal():
                return Type(expression.type)
            case syntax.ParamReference():
                return self._param(expression)
            case syntax.Reference(parts=(word,)):
                return self._word(word, expression, wanted)
            case syntax.Reference():
                return self._attribute(expression)
            case syntax.ListExpression():
                return self._list(expression, wanted)
            case syntax.RangeExpression():
                return self._range(expression)
            case syntax.Unary(operator="not"):
                self.check(expression.operand, BOOL)
                return BOOL
            case syntax.Unary():
                return self._number(expression.operand)
            case syntax.Has():
                self._has(expression)
                return BOOL
            case syntax.Binary():
                return self._binary(expression)

    # Names -----------------------------------------------------------------------------------------------------------
    def _param(self, reference: syntax.ParamReference) -> Type:
        self.unit.used.add(f"${reference.name}")
        if reference.name in self.unit.param_types:
            return self.unit.param_types[reference.name]
        if reference.name in self.unit.param_declarations:
            message = f"`${reference.name}` has no value yet: this parameter and another one depend on each other"
            self.report.error("E022", message, reference.span)
            return UNKNOWN
        if self.unit.source.damaged:
            return UNKNOWN
        hint = (
            suggest(reference.name, self.unit.param_declarations)
            or f"declare it: `param {reference.name} : TYPE = VALUE`"
        )
        self.report.error("E022", f"unknown parameter `${reference.name}`", reference.span, hint=hint)
        return UNKNOWN

    def _word(self, word: str, reference: syntax.Reference, wanted: Type | None) -> Type:
        if word in self.aliases:
            hint = f"use one of its attributes, for example `{word}.layer`"
            self.report.error("E030", f"`{word}` is a match, not a value", reference.span, hint=hint)
            return UNKNOWN
        if wanted is not None and wanted.element.name in ENUMS:
            return self._constant(word, wanted.element.name, reference)
        if wanted is not None and wanted.element == STRING:
            self.report.error(
                "E030", f"expected a string, found the word `{word}`", reference.span, hint=f'write "{word}"'
            )
            return UNKNOWN
        homes = [enum for enum, words in ENUMS.items() if word in words]
        if wanted is not None or not homes:
            self._unknown_word(word, reference, wanted)
            return UNKNOWN
        return Type(homes[0])

    def _constant(self, word: str, enum: str, reference: syntax.Reference) -> Type:
        if word in ENUMS[enum]:
            return Type(enum)
        examples = "; a GPU is written cuda:0" if enum == "device" else ""
        hint = RETIRED.get((enum, word)) or suggest(word, ENUMS[enum]) or f"one of {listing(ENUMS[enum], 20)}{examples}"
        if word in self.unit.param_declarations:
            hint = f"a parameter is written `${word}`"
        self.report.error("E026", f"unknown {enum} `{word}`", reference.span, hint=hint)
        return UNKNOWN

    def _unknown_word(self, word: str, reference: syntax.Reference, wanted: Type | None) -> None:
        is_param = word in self.unit.param_declarations
        hint = f"a parameter is written `${word}`" if is_param else self._attribute_hint(word)
        hint = hint or suggest(word, [*self.aliases, *FACTS])
        if wanted is None:
            self.report.error("E023", f"unknown name `{word}`", reference.span, hint=hint)
        else:
            shown = "a condition" if wanted == BOOL else str(wanted)
            self.report.error("E030", f"expected {shown}, found the word `{word}`", reference.span, hint=hint)

    def _attribute_hint(self, word: str) -> str:
        """Return how an attribute of a match or of a fact is written, an empty text for another word."""
        if not self.conditions:
            return ""
        owners = [alias for alias, capture in self.aliases.items() if word in capture.attributes]
        owners += [fact for fact, attributes in FACTS.items() if word in attributes]
        if owners:
            return f"write `{owners[0]}.{word}`"
        if word in CAPTURE_ATTRIBUTES and not self.aliases:
            return f"name the match, `match PATTERN as m`, and write `m.{word}`"
        return ""

    def _attribute(self, reference: syntax.Reference) -> Type:
        parts = reference.parts
        if not self.conditions:
            message = f"`{'.'.join(parts)}` is known only when a model is matched; a constant is required here"
            self.report.error("E030", message, reference.span)
            return UNKNOWN
        if parts[0] in FACTS and parts[0] not in self.aliases:
            return self._fact(reference)
        owner = find_capture(parts[:-1], reference.span, self.aliases, self.report)
        return self._capture_attribute(owner, reference) if owner else UNKNOWN

    def _fact(self, reference: syntax.Reference) -> Type:
        topic, *rest = reference.parts
        fact = FACTS[topic].get(rest[0]) if len(rest) == 1 else None
        if fact is not None:
            return fact
        hint = suggest(rest[0], FACTS[topic]) or f"facts: {listing(FACTS[topic])}"
        self.report.error("E023", f"`{topic}` has no fact `{'.'.join(rest)}`", reference.span, hint=hint)
        return UNKNOWN

    def _capture_attribute(self, owner: Capture, reference: syntax.Reference) -> Type:
        *path, name = reference.parts
        shown = ".".join(path)
        attribute = owner.attributes.get(name)
        if attribute is not None:
            self._warn_if_absent(owner, reference)
            return attribute
        if name in owner.members:
            hint = f"use one of its attributes, for example `{shown}.{name}.dtype`"
            self.report.error("E030", f"`{shown}.{name}` is a capture, not a value", reference.span, hint=hint)
            return UNKNOWN
        options = [*owner.attributes, *owner.members]
        hint = suggest(name, options) or f"attributes: {listing(owner.attributes)}"
        self.report.error("E023", f"`{shown}` has no capture or attribute `{name}`", reference.span, hint=hint)
        return UNKNOWN

    def _warn_if_absent(self, owner: Capture, reference: syntax.Reference) -> None:
        path = reference.parts[:-1]
        guarded = any(path[: len(guard)] == guard for guard in self.guards)
        if owner.optional and not guarded:
            message = f"`{'.'.join(path)}` may be absent; the condition is then false"
            hint = f"state it: `{'.'.join(path[:-1])} has {path[-1]} and ...`"
            self.report.warning("W055", message, reference.span, hint=hint)

    # Compound expressions --------------------------------------------------------------------------------------------
    def _list(self, expression: syntax.ListExpression, wanted: Type | None) -> Type:
        if not expression.items:
            return EMPTY_LIST
        element = wanted.element if wanted is not None and wanted.container == "list" else None
        for item in expression.items:
            inferred = self.infer(item, element) if element is None else self.check(item, element)
            if inferred == UNKNOWN:
                return UNKNOWN
            element = element or inferred
        assert element is not None, "a list with items has an element type"
        if element.container != "one" or element == RANGE:
            self.report.error("E030", f"a list holds single values, not {element}", expression.span)
            return UNKNOWN
        return Type(element.name, "list")

    def _range(self, expression: syntax.RangeExpression) -> Type:
        ends = (self.check(expression.low, INT), self.check(expression.high, INT))
        if UNKNOWN in ends:
            return UNKNOWN
        value = constant(expression, self.unit.params)
        if isinstance(value, range) and not value:
            self.report.error("E030", f"the range {value.start}..{value.stop - 1} is empty", expression.span)
        return RANGE

    def _has(self, expression: syntax.Has) -> None:
        subject = expression.subject
        if isinstance(subject, syntax.Reference) and subject.parts[0] in self.aliases:
            self._has_capture(expression, subject.parts)
            return
        inferred = self.infer(subject)
        if inferred == UNKNOWN:
            return
        words = ENUMS.get(inferred.name, ())
        if inferred.container == "one" or not words:
            self.report.error("E030", f"`has` needs a match or a set, found {inferred}", subject.span)
        elif expression.name not in words:
            hint = suggest(expression.name, words) or f"one of {listing(words, 20)}"
            self.report.error("E026", f"unknown {inferred.name} `{expression.name}`", expression.span, hint=hint)

    def _has_capture(self, expression: syntax.Has, parts: tuple[str, ...]) -> None:
        owner = find_capture(parts, expression.subject.span, self.aliases, self.report)
        if owner is None:
            return
        member = owner.members.get(expression.name)
        if member is None:
            hint = suggest(expression.name, owner.members) or f"captures: {listing(owner.members)}"
            self.report.error(
                "E023", f"`{'.'.join(parts)}` has no capture `{expression.name}`", expression.span, hint=hint
            )
        elif not member.optional and not owner.optional:
            message = f"`{'.'.join(parts)}` always has `{expression.name}`"
            self.report.warning("W054", message, expression.span, label="this is always true")

    def _binary(self, expression: syntax.Binary) -> Type:
        if expression.operator in ("and", "or"):
            self.check(expression.left, BOOL)
            self.check(expression.right, BOOL)
            return BOOL
        if expression.operator in ("in", "not in"):
            self._membership(expression)
            return BOOL
        if expression.operator in ("==", "!=", *_ORDERINGS):
            self._comparison(expression)
            return BOOL
        sides = (self._number(expression.left), self._number(expression.right))
        if UNKNOWN in sides:
            return UNKNOWN
        if SIZE in sides:
            return SIZE
        return FLOAT if FLOAT in sides or expression.operator == "/" else INT

    def _membership(self, expression: syntax.Binary) -> None:
        left = self.infer(expression.left)
        if left == UNKNOWN:
            return
        right = self.infer(expression.right, Type(left.name, "list"))
        if right == RANGE and left not in (INT, FLOAT, SIZE):
            self.report.error("E030", f"a range holds numbers, found {left}", expression.left.span)
        elif right in (RANGE, UNKNOWN, EMPTY_LIST):
            return
        elif right.container == "one" or not fits(left, right.element):
            self._not_a_list(expression.right, left, right)

    def _not_a_list(self, expression: syntax.Expression, left: Type, right: Type) -> None:
        """Report the right side of `in` that is neither a range nor a list of the left side's type."""
        if right.container != "one":
            self.report.error("E030", f"cannot look for {left} in {right}", expression.span)
            return
        message, written = f"`in` needs a range or a list, found {right}", print_expression(expression)
        hint = f"a list is written `[{written}]`, and one value is compared with `==`"
        if isinstance(expression, syntax.Binary) and expression.operator == "-":
            first, last = print_expression(expression.left), print_expression(expression.right)
            hint = f"a range with both ends is written `{first}..{last}`"
        self.report.error("E030", message, expression.span, hint=hint)

    def _comparison(self, expression: syntax.Binary) -> None:
        first, second = expression.left, expression.right
        if isinstance(first, syntax.Reference) and len(first.parts) == 1:
            first, second = second, first  # a bare word takes its type from the other side
        left = self.infer(first)
        right = self.infer(second, left if left != UNKNOWN else None)
        if UNKNOWN in (left, right):
            return
        if left != right and not (left.is_number and right.is_number):
            self.report.error("E030", f"cannot compare {left} with {right}", expression.span)
        elif expression.operator in _ORDERINGS and not left.is_number:
            self.report.error("E030", f"`{expression.operator}` needs numbers, found {left}", expression.span)

    def _number(self, expression: syntax.Expression) -> Type:
        inferred = self.infer(expression)
        if inferred.is_number or inferred == UNKNOWN:
            return inferred
        self.report.error("E030", f"arithmetic needs numbers, found {inferred}", expression.span)
        return UNKNOWN


def _guards(expression: syntax.Expression) -> list[_Guard]:
    """Return every `m has x` in a condition, as the path `(m, x)`."""
    tests = (part for part in syntax.walk(expression) if isinstance(part, syntax.Has))
    return [(*test.subject.parts, test.name) for test in tests if isinstance(test.subject, syntax.Reference)]

"""Convert Lark's parse tree of a `.ktr` file into the frozen syntax tree, with a span on every node.

Faults that the grammar accepts (keywords as names, numbers too large, operands after attributes) are collected in
`diagnostics`. With any diagnostic, the returned tree must not be used.
"""

from __future__ import annotations

import math
import re
from typing import Any

from lark import Token, Tree
from lark.tree import Meta

from ktc.diagnostics import Diagnostic, Span
from ktc.language.dsl import syntax
from ktc.language.dsl.schema import INFIX, KEYWORDS

_Arguments = tuple[syntax.Argument, ...] | None
_Texts = tuple[syntax.Text, ...] | None
_UNITS = {"B": 1} | {
    f"{prefix}{infix}B": base**power
    for infix, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}
_OPERATOR_NAMES = {symbol: name for name, symbol in INFIX.items()}
_MAX_DIGITS = 18  # of an integer: every value fits into 64 bits


class TreeBuilder:
    """Build nodes of one file: a method for each rule of the grammar. `diagnostics` is filled meanwhile."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.diagnostics: list[Diagnostic] = []

    def build(self, tree: Tree[Token]) -> Any:
        """Return the node of a tree, by the method of its rule on the nodes and tokens of its children."""
        children = [self.build(child) if isinstance(child, Tree) else child for child in tree.children]
        return getattr(self, tree.data)(tree.meta, *children)

    # Declarations ----------------------------------------------------------------------------------------------------
    def import_(self, meta: Meta, path: Token, alias: Token | None, arguments: _Arguments) -> syntax.Import:
        return syntax.Import(self._text(path), self._optional_name(alias), arguments or (), span=self._span(meta))

    def param(
        self, meta: Meta, name: Token, type_: syntax.TypeName, default: syntax.Expression,
        domain: syntax.Expression | None,
    ) -> syntax.Param:  # fmt: skip
        return syntax.Param(self._name(name), type_, default, domain, span=self._span(meta))

    def type_name(self, meta: Meta, name: Token, element: Token | None) -> syntax.TypeName:
        return syntax.TypeName(self._name(name), self._optional_name(element), span=self._span(meta))

    def require(self, meta: Meta, condition: syntax.Expression, message: Token | None) -> syntax.Require:
        text = self._text(message) if message is not None else None
        return syntax.Require(condition, text, span=self._span(meta))

    def block(self, meta: Meta, kind: Token, *settings: syntax.Setting) -> syntax.Block:
        return syntax.Block("plan" if kind == "plan" else "lora", settings, span=self._span(meta))

    def setting(self, meta: Meta, key: Token, value: syntax.Expression) -> syntax.Setting:
        return syntax.Setting(self._name(key), value, span=self._span(meta))

    # Patterns --------------------------------------------------------------------------------------------------------
    def pattern(
        self, meta: Meta, name: Token, inputs: tuple[syntax.Name, ...] | None, outputs: tuple[syntax.Name, ...],
        role: Token | None, *bindings: syntax.Binding,
    ) -> syntax.Pattern:  # fmt: skip
        role_name = self._optional_name(role)
        return syntax.Pattern(self._name(name), inputs or (), outputs, role_name, bindings, span=self._span(meta))

    def names(self, _: Meta, *names: Token) -> tuple[syntax.Name, ...]:
        return tuple(map(self._name, names))

    def bind(self, meta: Meta, names: tuple[syntax.Name, ...], term: syntax.Term) -> syntax.Binding:
        return syntax.Binding(names, term, span=self._span(meta))

    def use(self, meta: Meta, name: syntax.QualifiedName) -> syntax.Term:
        span = self._span(meta)
        return syntax.Wildcard(span=span) if name.parts == ("_",) else syntax.Use(name.parts, span=span)

    def call(
        self, meta: Meta, callee: syntax.QualifiedName, given: tuple[syntax.Term | syntax.Argument, ...] | None
    ) -> syntax.Call:
        operands: list[syntax.Term] = []
        attributes: list[syntax.Argument] = []
        for part in given or ():
            if isinstance(part, syntax.Argument):
                attributes.append(part)
                continue
            if attributes:
                self._refuse("an operand follows `name = value`", part.span, "put the operands first")
            operands.append(part)
        return syntax.Call(callee.parts, tuple(operands), tuple(attributes), span=self._span(meta))

    def targs(self, _: Meta, *parts: syntax.Term | syntax.Argument | None) -> tuple[syntax.Term | syntax.Argument, ...]:
        return tuple(part for part in parts if part is not None)

    def alternatives(self, meta: Meta, *choices: syntax.Term) -> syntax.Alternatives:
        return syntax.Alternatives(choices, span=self._span(meta))

    def maybe(self, meta: Meta, term: syntax.Term) -> syntax.Maybe:
        return syntax.Maybe(term, span=self._span(meta))

    def combine(self, meta: Meta, left: syntax.Term, symbol: Token, right: syntax.Term) -> syntax.Call:
        if symbol == "%":
            self._refuse("`%` is not an operator of patterns", self._span(symbol), "patterns have + - * /")
        name = _OPERATOR_NAMES.get(str(symbol), "mul")
        return syntax.Call((name,), (left, right), span=self._span(meta))

    # Rules -----------------------------------------------------------------------------------------------------------
    def rule(
        self, meta: Meta, name: Token, overrides: tuple[syntax.QualifiedName, ...] | None, match: tuple[Any, ...],
        *clauses: Any,
    ) -> syntax.Rule:  # fmt: skip
        root, alias, at, except_ = match
        where, expect, *actions = clauses
        return syntax.Rule(
            name=self._name(name),
            overrides=overrides or (),
            root=root,
            alias=alias,
            at=at,
            except_=except_,
            where=where,
            expect=expect,
            actions=tuple(actions),
            span=self._span(meta),
        )

    def overrides(self, _: Meta, *losers: syntax.QualifiedName) -> tuple[syntax.QualifiedName, ...]:
        return losers

    def lora_rule(self, meta: Meta, block: Token, name: Token) -> syntax.QualifiedName:
        """Return the name of the `lora` block's implicit rule."""
        return syntax.QualifiedName((str(block), self._name(name).text), span=self._span(meta))

    def match(
        self, _: Meta, root: syntax.QualifiedName, alias: Token | None, at: _Texts, except_: _Texts
    ) -> tuple[Any, ...]:
        return root, self._optional_name(alias), at or (), except_ or ()

    def at(self, _: Meta, *globs: Token) -> tuple[syntax.Text, ...]:
        return tuple(map(self._text, globs))

    def except_(self, _: Meta, *globs: Token) -> tuple[syntax.Text, ...]:
        return tuple(map(self._text, globs))

    def where(self, _: Meta, condition: syntax.Expression) -> syntax.Expression:
        return condition

    def expect(self, meta: Meta, operator: Token | None, count: syntax.Expression) -> syntax.Expect:
        return syntax.Expect(str(operator or "=="), count, span=self._span(meta))

    def action(
        self, meta: Meta, target: Token, arguments: _Arguments, on: tuple[syntax.QualifiedName, ...] | None
    ) -> syntax.Action:
        return syntax.Action(self._name(target), arguments or (), on or (), span=self._span(meta))

    def on(self, _: Meta, *captures: syntax.QualifiedName) -> tuple[syntax.QualifiedName, ...]:
        return captures

    def args(self, _: Meta, *given: syntax.Expression | syntax.Argument | None) -> tuple[syntax.Argument, ...]:
        return tuple(
            part if isinstance(part, syntax.Argument) else syntax.Argument(None, part, span=part.span)
            for part in given
            if part is not None
        )

    def named(self, meta: Meta, name: Token, value: syntax.Expression) -> syntax.Argument:
        return syntax.Argument(self._name(name).text, value, span=self._span(meta))

    # Expressions -----------------------------------------------------------------------------------------------------
    def binary(self, meta: Meta, left: syntax.Expression, operator: Token, right: syntax.Expression) -> syntax.Binary:
        return syntax.Binary(str(operator), left, right, span=self._span(meta))

    def not_in(self, meta: Meta, left: syntax.Expression, right: syntax.Expression) -> syntax.Binary:
        return syntax.Binary("not in", left, right, span=self._span(meta))

    def negation(self, meta: Meta, operand: syntax.Expression) -> syntax.Unary:
        return syntax.Unary("not", operand, span=self._span(meta))

    def minus(self, meta: Meta, operand: syntax.Expression) -> syntax.Unary:
        return syntax.Unary("-", operand, span=self._span(meta))

    def has(self, meta: Meta, subject: syntax.Expression, name: Token) -> syntax.Has:
        return syntax.Has(subject, self._name(name).text, span=self._span(meta))

    def interval(self, meta: Meta, low: syntax.Expression, high: syntax.Expression) -> syntax.RangeExpression:
        return syntax.RangeExpression(low, high, span=self._span(meta))

    def items(self, meta: Meta, *items: syntax.Expression | None) -> syntax.ListExpression:
        return syntax.ListExpression(tuple(item for item in items if item is not None), span=self._span(meta))

    def reference(self, meta: Meta, name: syntax.QualifiedName) -> syntax.Reference:
        return syntax.Reference(name.parts, span=self._span(meta))

    def qname(self, meta: Meta, *parts: Token) -> syntax.QualifiedName:
        return syntax.QualifiedName(tuple(self._name(part).text for part in parts), span=self._span(meta))

    def literal(self, meta: Meta, token: Token) -> syntax.Expression:
        span = self._span(meta)
        match token.type:
            case "VARIABLE":
                return syntax.ParamReference(token[1:], span=span)
            case "STRING":
                return syntax.Literal("string", _unescape(token), span=span)
            case "TRUE" | "FALSE":
                return syntax.Literal("bool", token.type == "TRUE", span=span)
            case "DEVICE":
                return syntax.Literal("device", str(token), span=span)
            case _:
                return syntax.Literal(token.type.lower(), self._number(token), span=span)

    # Tokens ----------------------------------------------------------------------------------------------------------
    def _number(self, token: Token) -> int | float:
        number, unit = token.rstrip("KMGTiB "), token.lstrip("0123456789. ")
        if token.type != "FLOAT" and len(number.partition(".")[0]) > _MAX_DIGITS:
            self._refuse(f"a number has at most {_MAX_DIGITS} digits", self._span(token), code="E013")
            return 0
        if token.type == "INT":
            return int(number)
        if token.type == "SIZE":
            return int(number) * _UNITS[unit] if "." not in number else int(float(number) * _UNITS[unit])
        if not math.isfinite(float(number)):
            self._refuse("this number is too large", self._span(token), code="E013")
        return float(number)

    def _optional_name(self, token: Token | None) -> syntax.Name | None:
        return self._name(token) if token is not None else None

    def _name(self, token: Token) -> syntax.Name:
        span = self._span(token)
        if str(token) in KEYWORDS:
            self._refuse(f"`{token}` is a reserved word and cannot be a name", span, "choose another name")
        return syntax.Name(str(token), span=span)

    def _text(self, token: Token) -> syntax.Text:
        return syntax.Text(_unescape(token), span=self._span(token))

    def _refuse(self, message: str, span: Span, hint: str = "", code: str = "E001") -> None:
        self.diagnostics.append(Diagnostic(code, message, span, hint=hint))

    def _span(self, place: Token | Meta) -> Span:
        line, column = place.line or 1, place.column or 1
        return Span(self.file, line, column, place.end_line or line, place.end_column or column)


def _unescape(token: Token) -> str:
    return re.sub(r'\\(["\\])', r"\1", token[1:-1])

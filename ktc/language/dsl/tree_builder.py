"""Convert Lark's parse tree of a `.ktr` file into the frozen syntax tree, with a span on every node.

Faults that the grammar accepts (keywords as names, numbers too large, operands after attributes) are collected in
`diagnostics`. With any diagnostic, the returned tree must not be used.
"""

from __future__ import annotations

import math
import re
from typing import cast

from lark import Token, Tree

from ktc.diagnostics import Diagnostic, Span
from ktc.language.dsl import syntax
from ktc.language.dsl.schema import INFIX, KEYWORDS

Branch = Tree[Token] | Token | None

_UNITS = {"B": 1} | {
    f"{prefix}{infix}B": base**power
    for infix, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}
_OPERATOR_NAMES = {symbol: name for name, symbol in INFIX.items()}
_MAX_DIGITS = 18  # of an integer: every value fits into 64 bits


class TreeBuilder:
    """Build one file's declarations. `diagnostics` is filled meanwhile."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.diagnostics: list[Diagnostic] = []

    # Declarations ----------------------------------------------------------------------------------------------------
    def declaration(self, tree: Tree[Token]) -> syntax.Declaration:
        match tree.data:
            case "import_":
                return self._import(tree)
            case "param":
                return self._param(tree)
            case "require":
                return self._require(tree)
            case "pattern":
                return self._pattern(tree)
            case "rule":
                return self._rule(tree)
            case _:
                return self._block(tree)

    def _import(self, tree: Tree[Token]) -> syntax.Import:
        path, alias, arguments = _children(tree)
        return syntax.Import(
            self._text(path), self._optional_name(alias), self._arguments(arguments), span=self._span(tree)
        )

    def _param(self, tree: Tree[Token]) -> syntax.Param:
        name, type_, default, domain = _children(tree)
        type_name, element = _children(type_)
        return syntax.Param(
            self._name(name),
            syntax.TypeName(self._name(type_name), self._optional_name(element), span=self._span(type_)),
            self.expression(default),
            self.expression(domain) if domain is not None else None,
            span=self._span(tree),
        )

    def _require(self, tree: Tree[Token]) -> syntax.Require:
        condition, message = _children(tree)
        text = self._text(message) if message is not None else None
        return syntax.Require(self.expression(condition), text, span=self._span(tree))

    def _pattern(self, tree: Tree[Token]) -> syntax.Pattern:
        name, inputs, outputs, role, *bindings = _children(tree)
        return syntax.Pattern(
            self._name(name),
            self._names(inputs),
            self._names(outputs),
            self._optional_name(role),
            tuple(self._binding(binding) for binding in bindings),
            span=self._span(tree),
        )

    def _binding(self, tree: Branch) -> syntax.Binding:
        names, term = _children(tree)
        return syntax.Binding(self._names(names), self._term(term), span=self._span(tree))

    def _rule(self, tree: Tree[Token]) -> syntax.Rule:
        name, overrides, match, where, expect, *actions = _children(tree)
        root, alias, at, except_ = _children(match)
        return syntax.Rule(
            name=self._name(name),
            overrides=tuple(self._loser(child) for child in _children(overrides)),
            root=self._qualified_name(root),
            alias=self._optional_name(alias),
            at=tuple(self._text(child) for child in _children(at)),
            except_=tuple(self._text(child) for child in _children(except_)),
            where=self.expression(_children(where)[0]) if where is not None else None,
            expect=self._expect(expect) if expect is not None else None,
            actions=tuple(self._action(action) for action in actions),
            span=self._span(tree),
        )

    def _expect(self, tree: Branch) -> syntax.Expect:
        operator, count = _children(tree)
        return syntax.Expect(str(operator or "=="), self.expression(count), span=self._span(tree))

    def _action(self, tree: Branch) -> syntax.Action:
        target, arguments, on = _children(tree)
        captures = tuple(self._qualified_name(child) for child in _children(on))
        return syntax.Action(self._name(target), self._arguments(arguments), captures, span=self._span(tree))

    def _block(self, tree: Tree[Token]) -> syntax.Block:
        kind, *settings = _children(tree)
        return syntax.Block(
            "plan" if kind == "plan" else "lora",
            tuple(self._setting(setting) for setting in settings),
            span=self._span(tree),
        )

    def _setting(self, tree: Branch) -> syntax.Setting:
        key, value = _children(tree)
        return syntax.Setting(self._name(key), self.expression(value), span=self._span(tree))

    # Terms of patterns -----------------------------------------------------------------------------------------------
    def _term(self, branch: Branch) -> syntax.Term:
        tree = _tree(branch)
        span = self._span(tree)
        match tree.data:
            case "use":
                parts = self._parts(_children(tree)[0])
                return syntax.Wildcard(span=span) if parts == ("_",) else syntax.Use(parts, span=span)
            case "call":
                return self._call(tree)
            case "alternatives":
                return syntax.Alternatives(tuple(self._term(child) for child in _children(tree)), span=span)
            case "maybe":
                return syntax.Maybe(self._term(_children(tree)[0]), span=span)
            case _:
                return self._infix_call(tree)

    def _call(self, tree: Tree[Token]) -> syntax.Call:
        callee, operands_tree = _children(tree)
        operands: list[syntax.Term] = []
        attributes: list[syntax.Argument] = []
        for child in _children(operands_tree):
            if child is not None and _tree(child).data == "named":
                attributes.append(self._named(child))
            elif child is not None:
                if attributes:
                    self._refuse("an operand follows `name = value`", child, "put the operands first")
                operands.append(self._term(child))
        return syntax.Call(self._parts(callee), tuple(operands), tuple(attributes), span=self._span(tree))

    def _infix_call(self, tree: Tree[Token]) -> syntax.Call:
        left, symbol, right = _children(tree)
        if symbol == "%":
            self._refuse("`%` is not an operator of patterns", symbol, "patterns have + - * /")
        name = _OPERATOR_NAMES.get(str(symbol), "mul")
        return syntax.Call((name,), (self._term(left), self._term(right)), span=self._span(tree))

    # Expressions -----------------------------------------------------------------------------------------------------
    def expression(self, branch: Branch) -> syntax.Expression:
        if isinstance(branch, Token):
            return self._literal(branch)
        tree = _tree(branch)
        children = _children(tree)
        span = self._span(tree)
        match tree.data:
            case "reference":
                return syntax.Reference(self._parts(children[0]), span=span)
            case "list":
                items = (self.expression(child) for child in children if child is not None)
                return syntax.ListExpression(tuple(items), span=span)
            case "interval":
                return syntax.RangeExpression(self.expression(children[0]), self.expression(children[1]), span=span)
            case "negation":
                return syntax.Unary("not", self.expression(children[0]), span=span)
            case "minus":
                return syntax.Unary("-", self.expression(children[0]), span=span)
            case "has":
                return syntax.Has(self.expression(children[0]), self._name(children[1]).text, span=span)
            case "not_in":
                left, right = children
                return syntax.Binary("not in", self.expression(left), self.expression(right), span=span)
            case _:
                left, operator, right = children
                return syntax.Binary(str(operator), self.expression(left), self.expression(right), span=span)

    def _literal(self, token: Token) -> syntax.Expression:
        span = self._span(token)
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

    def _number(self, token: Token) -> int | float:
        number, unit = token.rstrip("KMGTiB "), token.lstrip("0123456789. ")
        if token.type != "FLOAT" and len(number.partition(".")[0]) > _MAX_DIGITS:
            self._refuse(f"a number has at most {_MAX_DIGITS} digits", token, "", code="E013")
            return 0
        if token.type == "INT":
            return int(number)
        if token.type == "SIZE":
            return int(number) * _UNITS[unit] if "." not in number else int(float(number) * _UNITS[unit])
        if not math.isfinite(float(number)):
            self._refuse("this number is too large", token, "", code="E013")
        return float(number)

    # Names and arguments ---------------------------------------------------------------------------------------------
    def _arguments(self, tree: Branch) -> tuple[syntax.Argument, ...]:
        return tuple(self._argument(child) for child in _children(tree) if child is not None)

    def _argument(self, branch: Branch) -> syntax.Argument:
        if isinstance(branch, Tree) and branch.data == "named":
            return self._named(branch)
        return syntax.Argument(None, self.expression(branch), span=self._span(branch))

    def _named(self, tree: Branch) -> syntax.Argument:
        name, value = _children(tree)
        return syntax.Argument(self._name(name).text, self.expression(value), span=self._span(tree))

    def _names(self, tree: Branch) -> tuple[syntax.Name, ...]:
        return tuple(self._name(child) for child in _children(tree))

    def _optional_name(self, branch: Branch) -> syntax.Name | None:
        return self._name(branch) if branch is not None else None

    def _name(self, branch: Branch) -> syntax.Name:
        token = cast("Token", branch)
        if str(token) in KEYWORDS:
            self._refuse(f"`{token}` is a reserved word and cannot be a name", token, "choose another name")
        return syntax.Name(str(token), span=self._span(token))

    def _qualified_name(self, tree: Branch) -> syntax.QualifiedName:
        return syntax.QualifiedName(self._parts(tree), span=self._span(tree))

    def _loser(self, tree: Branch) -> syntax.QualifiedName:
        """Return a rule's name, or the name of the `lora` block's implicit rule."""
        if _tree(tree).data != "lora_rule":
            return self._qualified_name(tree)
        block, name = _children(tree)
        return syntax.QualifiedName((str(block), self._name(name).text), span=self._span(tree))

    def _parts(self, tree: Branch) -> tuple[str, ...]:
        return tuple(self._name(child).text for child in _children(tree))

    def _text(self, branch: Branch) -> syntax.Text:
        return syntax.Text(_unescape(cast("Token", branch)), span=self._span(branch))

    def _refuse(self, message: str, branch: Branch, hint: str, code: str = "E001") -> None:
        self.diagnostics.append(Diagnostic(code, message, self._span(branch), hint=hint))

    def _span(self, branch: Branch) -> Span:
        assert branch is not None, "an absent part has no span"
        place = branch if isinstance(branch, Token) else branch.meta
        line, column = place.line or 1, place.column or 1
        return Span(self.file, line, column, place.end_line or line, place.end_column or column)


def _children(tree: Branch) -> list[Branch]:
    """Return the children of a branch; empty for an absent branch."""
    return cast("list[Branch]", tree.children) if isinstance(tree, Tree) else []


def _tree(branch: Branch) -> Tree[Token]:
    assert isinstance(branch, Tree), "the grammar yields a tree here"
    return branch


def _unescape(token: Token) -> str:
    return re.sub(r'\\(["\\])', r"\1", token[1:-1])

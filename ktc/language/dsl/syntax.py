"""The syntax tree of a `.ktr` file: frozen dataclasses, every node with its span.

Spans are excluded from equality, so that `parse(print(module)) == module` can be tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal as OneOf

from ktc.diagnostics import Span

NOWHERE = Span("", 0, 0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    span: Span = field(default=NOWHERE, compare=False, repr=False)


# Names and texts -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Name(Node):
    text: str


@dataclass(frozen=True, slots=True)
class QualifiedName(Node):
    """`attn.mla`, `a.q`: one or more names joined by dots."""

    parts: tuple[str, ...]

    def __str__(self) -> str:
        return ".".join(self.parts)


@dataclass(frozen=True, slots=True)
class Text(Node):
    """A quoted string, unescaped."""

    value: str


# Expressions ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Literal(Node):
    """`type` is int, float, bool, string, size (bytes) or device."""

    type: str
    value: int | float | bool | str


@dataclass(frozen=True, slots=True)
class Reference(Node):
    """A bare word: an enum constant (one part), or an attribute of an alias or a fact (`a.layer`, `model.type`)."""

    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ParamReference(Node):
    """`$name`."""

    name: str


@dataclass(frozen=True, slots=True)
class ListExpression(Node):
    items: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class RangeExpression(Node):
    """`low..high`, inclusive at both ends."""

    low: Expression
    high: Expression


@dataclass(frozen=True, slots=True)
class Unary(Node):
    operator: OneOf["-", "not"]
    operand: Expression


@dataclass(frozen=True, slots=True)
class Binary(Node):
    """Arithmetic, comparison, `and`, `or`, `in`, `not in`."""

    operator: str
    left: Expression
    right: Expression


@dataclass(frozen=True, slots=True)
class Has(Node):
    """`m has shared`, `host.isa has amx`."""

    subject: Expression
    name: str


Expression = Literal | Reference | ParamReference | ListExpression | RangeExpression | Unary | Binary | Has


def operands(expression: Expression) -> tuple[Expression, ...]:
    """Return the direct operands of an expression; empty for a leaf."""
    match expression:
        case ListExpression():
            return expression.items
        case RangeExpression():
            return (expression.low, expression.high)
        case Unary():
            return (expression.operand,)
        case Binary():
            return (expression.left, expression.right)
        case Has():
            return (expression.subject,)
        case _:
            return ()


def walk(expression: Expression) -> Iterator[Expression]:
    """Yield an expression and everything in it, in the order of the text."""
    yield expression
    for operand in operands(expression):
        yield from walk(operand)


@dataclass(frozen=True, slots=True)
class Argument(Node):
    """`value` or `name = value`."""

    name: str | None
    value: Expression


# Pattern terms -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Use(Node):
    """A name bound in the same pattern, or a member of one (`router.indices`)."""

    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wildcard(Node):
    """`_`: anything."""


@dataclass(frozen=True, slots=True)
class Call(Node):
    """An operator or a pattern applied to operands; `attributes` are `name = value` pairs. `a + b` is `add(a, b)`."""

    callee: tuple[str, ...]
    operands: tuple[Term, ...]
    attributes: tuple[Argument, ...] = ()


@dataclass(frozen=True, slots=True)
class Alternatives(Node):
    """`t | u`: ordered, the first that matches wins."""

    choices: tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Maybe(Node):
    """`f(a, ...)?`: the call, or its first operand alone."""

    term: Term


Term = Use | Wildcard | Call | Alternatives | Maybe


@dataclass(frozen=True, slots=True)
class Binding(Node):
    names: tuple[Name, ...]
    term: Term


# Declarations --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Import(Node):
    path: Text
    alias: Name | None
    arguments: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class TypeName(Node):
    """`int`, or `list[isa]` with `element`."""

    name: Name
    element: Name | None = None


@dataclass(frozen=True, slots=True)
class Param(Node):
    name: Name
    type: TypeName
    default: Expression
    domain: Expression | None


@dataclass(frozen=True, slots=True)
class Require(Node):
    condition: Expression
    message: Text | None


@dataclass(frozen=True, slots=True)
class Pattern(Node):
    name: Name
    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]
    role: Name | None
    bindings: tuple[Binding, ...]


@dataclass(frozen=True, slots=True)
class Action(Node):
    target: Name
    arguments: tuple[Argument, ...]
    on: tuple[QualifiedName, ...]


@dataclass(frozen=True, slots=True)
class Expect(Node):
    """`expect 58`, `expect 1..60`, `expect >= 1`. `operator` defaults to `==`."""

    operator: str
    count: Expression


@dataclass(frozen=True, slots=True)
class Rule(Node):
    name: Name
    overrides: tuple[QualifiedName, ...]
    root: QualifiedName
    alias: Name | None
    at: tuple[Text, ...]
    except_: tuple[Text, ...]
    where: Expression | None
    expect: Expect | None
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Setting(Node):
    key: Name
    value: Expression


@dataclass(frozen=True, slots=True)
class Block(Node):
    """`plan { ... }` or `lora { ... }`."""

    kind: OneOf["plan", "lora"]
    settings: tuple[Setting, ...]


Declaration = Import | Param | Require | Pattern | Rule | Block


@dataclass(frozen=True, slots=True)
class Comment(Node):
    """A comment, kept for the formatter; `text` includes the `#`."""

    text: str


@dataclass(frozen=True, slots=True)
class Module(Node):
    """One file. Declarations are in source order; comments are excluded from equality."""

    file: str = field(compare=False)
    declarations: tuple[Declaration, ...]
    comments: tuple[Comment, ...] = field(default=(), compare=False)

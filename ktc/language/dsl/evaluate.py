"""The value of an expression, given parameters and a function that resolves facts of the match, host and model.

Evaluation is total. A missing or undefined value (an absent capture, a division by zero) is `None`. A condition over
`None` is `None` too and counts as false. No exception is raised for an expression that the checker accepted.
"""

from __future__ import annotations

import operator as op
from collections.abc import Callable, Mapping
from typing import Any

from ktc.language.dsl import syntax
from ktc.model.targets.settings import Value

Resolve = Callable[[tuple[str, ...]], Value]
Result = Value | range
_LARGEST = 2**63 - 1


def evaluate(expression: syntax.Expression, params: Mapping[str, Value], resolve: Resolve) -> Result:
    """Return the expression's value, a `range` for `a..b`, or `None`.

    `resolve` is called with references of two or more parts (`("m", "layer")`), and for `m has shared` with
    `("m", "has", "shared")`. A reference of one part is an enum constant; its value is its own text.
    """
    return _Evaluation(params, resolve).value(expression)


def constant(expression: syntax.Expression, params: Mapping[str, Value]) -> Result:
    """Return the value of an expression without references to model or host."""
    return evaluate(expression, params, lambda parts: None)


class _Evaluation:
    def __init__(self, params: Mapping[str, Value], resolve: Resolve) -> None:
        self.params = params
        self.resolve = resolve

    def value(self, expression: syntax.Expression) -> Result:
        match expression:
            case syntax.Literal():
                return expression.value
            case syntax.Reference(parts=parts):
                return parts[0] if len(parts) == 1 else self.resolve(parts)
            case syntax.ParamReference():
                return self.params.get(expression.name)
            case syntax.ListExpression():
                return self.items(expression)
            case syntax.RangeExpression():
                return self.interval(expression)
            case syntax.Unary():
                return self.unary(expression)
            case syntax.Has():
                return self.has(expression)
            case syntax.Binary(operator="and" | "or"):
                return self.logic(expression)
            case syntax.Binary():
                return _binary(expression.operator, self.value(expression.left), self.value(expression.right))

    def items(self, expression: syntax.ListExpression) -> Value:
        values = (self.value(item) for item in expression.items)
        return tuple(value for value in values if not isinstance(value, range))

    def interval(self, expression: syntax.RangeExpression) -> range | None:
        low, high = self.value(expression.low), self.value(expression.high)
        return range(low, high + 1) if isinstance(low, int) and isinstance(high, int) else None

    def unary(self, expression: syntax.Unary) -> Value:
        operand = self.value(expression.operand)
        if expression.operator == "not":
            return not operand if isinstance(operand, bool) else None
        return -operand if isinstance(operand, int | float) else None

    def has(self, expression: syntax.Has) -> bool:
        if isinstance(expression.subject, syntax.Reference):
            return bool(self.resolve((*expression.subject.parts, "has", expression.name)))
        subject = self.value(expression.subject)
        return isinstance(subject, tuple) and expression.name in subject

    def logic(self, expression: syntax.Binary) -> bool | None:
        """Apply three-valued logic: `false and missing` is false, `true or missing` is true."""
        decisive = expression.operator == "or"
        sides = (self.value(expression.left), self.value(expression.right))
        if any(side is decisive for side in sides):
            return decisive
        return None if any(side is None for side in sides) else not decisive


def _binary(symbol: str, left: Result, right: Result) -> Value:
    if left is None or right is None:
        return None
    if symbol in ("==", "!="):
        return (left == right) == (symbol == "==")
    if symbol in ("in", "not in"):
        return _contains(right, left) == (symbol == "in") if isinstance(right, range | tuple) else None
    if not isinstance(left, int | float) or not isinstance(right, int | float):
        return None
    try:
        result = _OPERATIONS[symbol](left, right)
    except (ZeroDivisionError, OverflowError):
        return None
    return result if -_LARGEST <= result <= _LARGEST else None


def _contains(container: range | tuple[Value, ...], value: Result) -> bool:
    """Test membership. `a..b` holds every number between its ends; Python's own test iterates for a float."""
    if isinstance(container, range) and isinstance(value, int | float):
        return container.start <= value <= container.stop - 1
    return value in container


_OPERATIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "<": op.lt, "<=": op.le, ">": op.gt, ">=": op.ge, "+": op.add, "-": op.sub, "*": op.mul,
    "/": lambda left, right: left / right, "%": lambda left, right: left % right,
}  # fmt: skip

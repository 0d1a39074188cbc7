"""A rule's selection as far as it is known without a model: paths and layers, or that parameters switch it off."""

from __future__ import annotations

from collections.abc import Mapping

from ktc.language.dsl import syntax
from ktc.language.dsl.evaluate import constant
from ktc.language.dsl.globs import is_glob
from ktc.language.dsl.intervals import ANY_LAYER, NO_LAYER, Layers, between
from ktc.language.dsl.ruleset import RuleDefinition
from ktc.language.dsl.shared_path import Selection
from ktc.model.targets.settings import Value

_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
_INFINITE = 1e12


def selection(rule: RuleDefinition, params: Mapping[str, Value]) -> Selection | None:
    """Return the rule's selection, or `None` if a glob is invalid or the condition uses more than the layer."""
    declaration = rule.declaration
    if not all(map(is_glob, (*rule.at, *rule.except_))):
        return None
    if declaration.where is None:
        return Selection(rule.at, rule.except_)
    alias = declaration.alias.text if declaration.alias else ""
    layers = _Condition(alias, params).layers(declaration.where)
    return Selection(rule.at, rule.except_, layers) if layers is not None else None


def is_switched_off(rule: RuleDefinition, params: Mapping[str, Value]) -> bool:
    """Return whether the parameters alone make the rule's condition false, for any model and host."""
    return rule.declaration.where is not None and _never_holds(rule.declaration.where, params)


def _never_holds(condition: syntax.Expression, params: Mapping[str, Value]) -> bool:
    if isinstance(condition, syntax.Binary) and condition.operator in ("and", "or"):
        sides = (_never_holds(side, params) for side in (condition.left, condition.right))
        return any(sides) if condition.operator == "and" else all(sides)
    return not asks_the_model(condition) and constant(condition, params) is not True


class _Condition:
    def __init__(self, alias: str, params: Mapping[str, Value]) -> None:
        self.layer = (alias, "layer")
        self.params = params

    def layers(self, expression: syntax.Expression) -> Layers | None:
        """Return the layers in which a condition holds, or `None` if it depends on anything else."""
        match expression:
            case syntax.Binary(operator="and" | "or"):
                left, right = self.layers(expression.left), self.layers(expression.right)
                if left is None or right is None:
                    return None
                return left.both(right) if expression.operator == "and" else left.either(right)
            case syntax.Unary(operator="not"):
                inner = self.layers(expression.operand)
                return inner.negated() if inner else None
            case syntax.Binary() if self._is_layer(expression.left):
                return self._compared(expression.operator, expression.right)
            case syntax.Binary() if self._is_layer(expression.right) and expression.operator in _MIRRORED:
                return self._compared(_MIRRORED[expression.operator], expression.left)
            case _:
                return self._fixed(expression)

    def _is_layer(self, expression: syntax.Expression) -> bool:
        return isinstance(expression, syntax.Reference) and expression.parts == self.layer

    def _compared(self, operator: str, other: syntax.Expression) -> Layers | None:
        if asks_the_model(other):
            return None
        value = constant(other, self.params)
        if isinstance(value, range):
            inside = between(value.start, value.stop - 1)
        elif isinstance(value, tuple):
            inside = Layers((), None)
            for number in value:
                inside = inside.either(between(number, number)) if isinstance(number, int | float) else inside
        elif isinstance(value, int | float):
            inside = _ordered(operator, value)
        else:
            return None
        return inside.negated() if operator in ("!=", "not in") else inside

    def _fixed(self, expression: syntax.Expression) -> Layers | None:
        """Return all layers or none for a condition over parameters alone."""
        if asks_the_model(expression):
            return None
        return ANY_LAYER if constant(expression, self.params) is True else NO_LAYER


def _ordered(operator: str, value: float) -> Layers:
    ends = {"<": (value, _INFINITE), ">=": (value, _INFINITE), "<=": (0, value), ">": (0, value)}
    layers = between(*ends.get(operator, (value, value)))
    return layers.negated() if operator in ("<", ">") else layers


def asks_the_model(expression: syntax.Expression) -> bool:
    """Return whether the expression has facts of a model, a host or a match, beside parameters."""
    return any(
        len(part.parts) > 1 if isinstance(part, syntax.Reference)
        else isinstance(part, syntax.Has) and isinstance(part.subject, syntax.Reference)
        for part in syntax.walk(expression)
    )  # fmt: skip

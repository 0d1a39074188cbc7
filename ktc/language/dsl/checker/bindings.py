"""Captures bound in a pattern, and their merge over operands and alternatives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ktc.diagnostics import Span
from ktc.language.dsl.checker.names import Capture, CheckedPattern

VALUE = Capture("value")


@dataclass(slots=True)
class Bound:
    """A bound name's capture, and the names that its value depends on: in any alternative, and in all of them."""

    capture: Capture
    span: Span
    any: frozenset[str] = field(default_factory=frozenset[str])
    all: frozenset[str] = field(default_factory=frozenset[str])


def common(captures: list[Capture]) -> Capture:
    """Return the capture of a value with several alternatives."""
    first = captures[0]
    if all(capture == first for capture in captures):
        return first
    return _choice([c.pattern for c in captures if c.pattern is not None], len(captures))


def _choice(patterns: list[CheckedPattern], choices: int) -> Capture:
    """Return the capture of a choice between patterns with the same outputs.

    It has the captures of any of them; those that are not in all of them are optional.
    """
    outputs = {tuple(output.text for output in p.declaration.outputs) for p in patterns}
    roles = {p.declaration.role.text if p.declaration.role else None for p in patterns}
    if len(patterns) < choices or len(outputs) > 1:
        return VALUE
    captures: dict[str, Capture] = {}
    for name in dict.fromkeys(name for p in patterns for name in p.captures):
        bound = [p.captures[name] for p in patterns if name in p.captures]
        optional = len(bound) < len(patterns) or any(c.optional for c in bound)
        captures[name] = replace(common([replace(c, optional=False) for c in bound]), optional=optional)
    spelled = " | ".join(p.name for p in patterns)
    joined = CheckedPattern(spelled, patterns[0].unit, patterns[0].declaration, captures)
    return Capture("match", roles.pop() if len(roles) == 1 else None, joined)


def union(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset(name for names in sets for name in names)

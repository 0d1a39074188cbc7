"""What is known of a name bound in a pattern, and how that knowledge is joined over operands and alternatives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ktc.diagnostics import Span
from ktc.dsl.checker.names import Capture, CheckedPattern

VALUE = Capture("value")


@dataclass(slots=True)
class Bound:
    """What is known of a bound name, and which names its value needs: in any alternative, and in all of them."""

    capture: Capture
    span: Span
    any: frozenset[str] = field(default_factory=frozenset[str])
    all: frozenset[str] = field(default_factory=frozenset[str])


def common(captures: list[Capture]) -> Capture:
    """What is known of a value that is one of several things."""
    first = captures[0]
    if all(capture == first for capture in captures):
        return first
    return _choice([c.pattern for c in captures if c.pattern is not None], len(captures))


def _choice(patterns: list[CheckedPattern], choices: int) -> Capture:
    """One of several patterns with the same outputs: what any of them captures, optional where not all of them do."""
    outputs = {tuple(output.text for output in p.declaration.outputs) for p in patterns}
    roles = {p.declaration.role.text if p.declaration.role else None for p in patterns}
    if len(patterns) < choices or len(outputs) > 1:
        return VALUE
    captures: dict[str, Capture] = {}
    for name in dict.fromkeys(name for p in patterns for name in p.captures):
        found = [p.captures[name] for p in patterns if name in p.captures]
        optional = len(found) < len(patterns) or any(c.optional for c in found)
        captures[name] = replace(common([replace(c, optional=False) for c in found]), optional=optional)
    spelled = " | ".join(p.name for p in patterns)
    joined = CheckedPattern(spelled, patterns[0].unit, patterns[0].declaration, captures)
    return Capture("match", roles.pop() if len(roles) == 1 else None, joined)


def union(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    """Every name that is in one of the sets."""
    return frozenset(name for names in sets for name in names)

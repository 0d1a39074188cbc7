"""What is known of a name bound in a pattern, and how that knowledge is joined over operands and alternatives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ktc.diagnostics import Span
from ktc.dsl.checker.names import Capture

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
    return first if all(capture == first for capture in captures) else VALUE


def union(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    """Every name that is in one of the sets."""
    return frozenset(name for names in sets for name in names)

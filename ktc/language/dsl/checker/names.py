"""Names during the check of a program: captures of patterns, and the declarations and parameters of a unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ktc.diagnostics import Related, Span, listing, suggest
from ktc.language.dsl import syntax
from ktc.language.dsl.checker.report import Report
from ktc.language.dsl.loader import SourceUnit
from ktc.language.dsl.schema import CAPTURE_ATTRIBUTES, FACTS, KIND_ATTRIBUTES, ROLES
from ktc.language.dsl.types import Type
from ktc.model.targets.settings import Value

_Declaration = TypeVar("_Declaration", syntax.Pattern, syntax.Rule, syntax.Param)


@dataclass(frozen=True, slots=True)
class Capture:
    """The capture of a bound name. `kind` is an operator's kind, or `match` for a whole pattern."""

    kind: str
    role: str | None = None
    pattern: CheckedPattern | None = None
    optional: bool = False

    @property
    def members(self) -> Mapping[str, Capture]:
        return self.pattern.captures if self.pattern else {}

    @property
    def attributes(self) -> dict[str, Type]:
        attributes = {**CAPTURE_ATTRIBUTES, **KIND_ATTRIBUTES.get(self.kind, {})}
        role = ROLES.get(self.role or "")
        return {**attributes, **role.attributes} if role else attributes

    def describe(self) -> str:
        return self.role or ("a pattern without a role" if self.kind == "match" else self.kind)


@dataclass(frozen=True, slots=True)
class CheckedPattern:
    """A pattern with its captures. `name` is qualified as seen from the entry file."""

    name: str
    unit: int
    declaration: syntax.Pattern
    captures: Mapping[str, Capture] = field(compare=False)

    def as_capture(self) -> Capture:
        return Capture("match", self.declaration.role.text if self.declaration.role else None, self)


@dataclass(slots=True)
class UnitNames:
    """One unit's declarations by name, its parameters' types and values, and the names used so far."""

    source: SourceUnit
    patterns: dict[str, syntax.Pattern]
    rules: dict[str, syntax.Rule]
    param_declarations: dict[str, syntax.Param]
    param_types: dict[str, Type] = field(default_factory=dict[str, Type])
    params: dict[str, Value] = field(default_factory=dict[str, Value])
    used: set[str] = field(default_factory=set[str])  # "$x", "pattern p", "import a"


def collect(source: SourceUnit, report: Report) -> UnitNames:
    """Return the unit's names; a second declaration of one is reported and the first is kept."""
    names = UnitNames(source, {}, {}, {})
    for declaration in source.module.declarations:
        match declaration:
            case syntax.Pattern():
                _add(names.patterns, declaration, declaration.name, "pattern", report)
            case syntax.Rule():
                _add(names.rules, declaration, declaration.name, "rule", report)
            case syntax.Param():
                _add(names.param_declarations, declaration, declaration.name, "parameter", report)
            case _:
                pass
    return names


def _add(
    table: dict[str, _Declaration], declaration: _Declaration, name: syntax.Name, what: str, report: Report
) -> None:
    first = table.setdefault(name.text, declaration)
    if first is not declaration:
        related = (Related(first.name.span, "first definition"),)
        report.error(
            "E020", f"{what} `{name.text}` is defined twice", name.span, label="second definition", related=related
        )


def find_capture(parts: tuple[str, ...], span: Span, aliases: Mapping[str, Capture], report: Report) -> Capture | None:
    """Return the capture of a path such as `m.router.gate`; report an unknown step. Optional if any step is."""
    capture = aliases.get(parts[0])
    if capture is None:
        no_alias = "name the match: `match PATTERN as m`" if not aliases else f"names here: {listing(aliases)}"
        report.error("E023", f"unknown name `{parts[0]}`", span, hint=suggest(parts[0], [*aliases, *FACTS]) or no_alias)
        return None
    for index, part in enumerate(parts[1:], start=1):
        member = capture.members.get(part)
        if member is None:
            owner = ".".join(parts[:index])
            hint = suggest(part, capture.members) or f"captures of `{owner}`: {listing(capture.members)}"
            report.error("E023", f"`{owner}` has no capture `{part}`", span, hint=hint)
            return None
        capture = replace(member, optional=capture.optional or member.optional)
    return capture

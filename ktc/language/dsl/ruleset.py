"""A checked rule program: the result of `dsl.load` and the input of the later stages.

Names are resolved, parameters have values, settings have their defaults. The program is independent of any model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ktc.diagnostics import Diagnostic, Span
from ktc.language.dsl import syntax
from ktc.model.targets.settings import Facet, Value
from ktc.model.targets.target import Target


@dataclass(frozen=True, slots=True)
class Unit:
    """One loaded file. `prefix` qualifies its names as seen from the entry file (`""` for the entry, `"attn."`)."""

    module: syntax.Module
    prefix: str
    imports: Mapping[str, int]  # alias -> index into RuleSet.units
    params: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class PatternDefinition:
    name: str  # qualified: "attn.mla"
    unit: int
    declaration: syntax.Pattern


@dataclass(frozen=True, slots=True)
class RuleAction:
    """One rewrite of a rule. `on` holds capture paths below the match (`("router", "gate")`); empty: the match.

    An empty path is the match itself, named by its alias.
    """

    target: Target  # with all its settings
    on: tuple[tuple[str, ...], ...]
    span: Span

    @property
    def facet(self) -> Facet:
        """The facet that the rewrite takes of what it claims."""
        return self.target.claimed_facet


@dataclass(frozen=True, slots=True)
class RuleDefinition:
    """`root` is a pattern's qualified name, or one of `linear experts embedding rms_norm layer_norm sdpa module`."""

    name: str
    unit: int
    declaration: syntax.Rule
    root: str
    at: tuple[str, ...]
    except_: tuple[str, ...]
    overrides: frozenset[str]  # transitive
    actions: tuple[RuleAction, ...]


@dataclass(frozen=True, slots=True)
class RuleSet:
    """The whole program, without the rules that its parameters switch off.

    `sources` maps the file names that spans use to their text, for diagnostics and the record.
    """

    entry: str
    units: tuple[Unit, ...]
    patterns: Mapping[str, PatternDefinition]
    rules: tuple[RuleDefinition, ...]
    requires: tuple[tuple[int, syntax.Require], ...]  # (unit, declaration)
    plan: Mapping[str, Value]  # budgets under their device ("cuda:0", "cpu"), the other keys by name
    lora: Mapping[str, Value]  # rank alpha dropout, dtype and targets if given; empty without a `lora` block
    settings: Mapping[str, str]  # the `--set` values
    sources: Mapping[str, str]
    warnings: tuple[Diagnostic, ...]

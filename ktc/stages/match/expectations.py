"""Check the demands of a program: every `require` holds, every rule matches as often as it expects.

Input: the rule set, the facts and the number of places of each rule. Output: one diagnostic per unmet demand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Final

from ktc.diagnostics import Diagnostic, listing
from ktc.language import dsl
from ktc.language.dsl import syntax
from ktc.language.dsl.evaluate import Result, constant, evaluate
from ktc.language.dsl.ruleset import RuleDefinition, RuleSet
from ktc.stages.match.facts import Facts
from ktc.stages.match.types import NearMiss

_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)")
_ALIKE: Final = 0.5  # share of equal characters, by difflib


@dataclass(frozen=True, slots=True)
class Counts:
    """The number of places that fit a rule's root, then its paths too, then its `where` too."""

    structural: int
    by_path: int
    selected: int


def unmet_requirements(rules: RuleSet, facts: Facts) -> list[Diagnostic]:
    """Return one diagnostic (M063) per `require` that does not hold, with the values of its facts."""
    problems: list[Diagnostic] = []
    for unit, require in rules.requires:
        if _value(require.condition, unit, rules, facts) is not True:
            reason = f": {require.message.value}" if require.message else ""
            references = (part.parts for part in syntax.walk(require.condition) if isinstance(part, syntax.Reference))
            tested = dict.fromkeys(parts for parts in references if len(parts) == 2)
            shown = ", ".join(f"`{'.'.join(fact)}` is `{facts.about(*fact)}`" for fact in tested)
            problems.append(Diagnostic("M063", f"requirement not met{reason}", require.condition.span, label=shown))
    hint = _fitting(rules, facts) if problems else ""
    return [replace(problem, hint=hint) for problem in problems]


def _fitting(rules: RuleSet, facts: Facts) -> str:
    """Return the bundled programs of the same mode whose requirements the model and the host meet."""
    mode = rules.plan.get("mode", "train")
    fits: list[str] = []
    for name in dsl.bundled():
        program = dsl.load(name)
        meets = all(_value(required.condition, unit, program, facts) is True for unit, required in program.requires)
        if meets and (program.plan.get("mode") == mode or "use" in program.units[0].params):
            fits.append(name)
    return f"bundled programs that fit: {listing(fits)}" if fits else ""


def may_match_nothing(rule: RuleDefinition, rules: RuleSet, facts: Facts) -> bool:
    """Return whether the rule's `expect` allows no match."""
    return not _count_mismatch(rule, rules, facts, 0)


def unmet_expectation(
    rule: RuleDefinition,
    rules: RuleSet,
    facts: Facts,
    counts: Counts,
    nearest: Sequence[NearMiss],
    paths: Sequence[str],
) -> Diagnostic | None:
    """Return the diagnostic (M060) for a rule with an unexpected number of matches, with the nearest miss.

    `paths` are the places that fit the rule's root.
    """
    wanted = _count_mismatch(rule, rules, facts, counts.selected)
    if not wanted:
        return None
    if counts.structural:
        by_path, by_where = counts.structural - counts.by_path, counts.by_path - counts.selected
        label = f"{counts.structural} match structurally; {by_path} rejected by path, {by_where} by `where`"
        close = _nearest_path(rule, paths) if not counts.by_path else ""
        hint = f"the nearest path is `{close}`" if close else "look at the paths with `ktc graph MODEL`"
    else:
        label = f"`{rule.root}` matches nothing in this model"
        hint = "look at the blocks with `ktc graph MODEL`; `expect >= 0` makes a rule optional"
        hint = f"closest: {nearest[0]}" if nearest else hint
    span = rule.declaration.expect.span if rule.declaration.expect else rule.declaration.name.span
    message = f"rule `{rule.name}` matched {counts.selected}, expected {wanted}"
    return Diagnostic("M060", message, span, label=label, hint=hint)


def _nearest_path(rule: RuleDefinition, paths: Sequence[str]) -> str:
    """Return the path, with `*` for its numbers, that is most like a glob of the rule, an empty text for none."""
    general = dict.fromkeys(_NUMBER.sub("*", path) for path in paths)
    return next((close[0] for glob in rule.at if (close := get_close_matches(glob, general, n=1, cutoff=_ALIKE))), "")


def _count_mismatch(rule: RuleDefinition, rules: RuleSet, facts: Facts, count: int) -> str:
    """Return the expected number if `count` differs from it, otherwise ""."""
    expect = rule.declaration.expect
    if expect is None:
        return "" if count >= 1 else "at least 1"
    wanted = _value(expect.count, rule.unit, rules, facts)
    if isinstance(wanted, range):
        return "" if count in wanted else f"{wanted.start}..{wanted.stop - 1}"
    if not isinstance(wanted, int):
        return "a number that is unknown for this model or host"
    sides = (syntax.Literal("int", number) for number in (count, wanted))
    holds = constant(syntax.Binary(expect.operator, *sides), {})
    spoken = {"==": f"{wanted}", "!=": f"other than {wanted}", "<": f"fewer than {wanted}", "<=": f"at most {wanted}"}
    return "" if holds else spoken.get(expect.operator, f"at least {wanted + (expect.operator == '>')}")


def _value(expression: syntax.Expression, unit: int, rules: RuleSet, facts: Facts) -> Result:
    """Return the value of an expression over model and host alone."""
    return evaluate(expression, rules.units[unit].params, facts.answer)

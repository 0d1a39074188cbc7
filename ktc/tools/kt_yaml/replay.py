"""Replay KTransformers' rules on a module tree in its own order: every module takes the first rule that matches.

A name is searched anywhere in the module's path. A class must be the module's own. A rule that is not recursive leaves
everything below its modules to the replacement. Modules that no rule matches stay on the default device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ktc.diagnostics import Diagnostic, InputRefused, suggest
from ktc.foundation.module_paths import from_inside
from ktc.foundation.timed_search import Invalid, TooMuchWork, search
from ktc.stages.capture import ModuleInfo
from ktc.tools.kt_yaml import names
from ktc.tools.kt_yaml.rules import KtRule


@dataclass(frozen=True, slots=True)
class Visit:
    """The result for one module. `rule` is None if none matched; `inside` is the module that was replaced whole."""

    module: ModuleInfo
    rule: KtRule | None
    inside: str | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """The visits of a replay. `dead` has the reason for every rule that never fires, by number."""

    visits: tuple[Visit, ...]
    fired: Mapping[int, int]
    dead: Mapping[int, str]


def replay(rules: Sequence[KtRule], modules: Sequence[ModuleInfo]) -> Replay:
    """Replay the rules on the module tree.

    Raises:
        InputRefused: K009, an expression takes too long on the modules' paths.
    """
    named = _named(rules, modules)
    visits: list[Visit] = []
    closed: dict[str, KtRule] = {}  # paths of modules whose insides belong to their replacement
    for module in modules:
        above = next((path for path in from_inside(module.fqn) if path in closed), None)
        if above is not None:
            visits.append(Visit(module, closed[above], above))
            continue
        rule = next((rule for rule in rules if _fits(rule, module, named)), None)
        visits.append(Visit(module, rule))
        if rule is not None and not rule.recursive:
            closed[module.fqn] = rule
    fired = Counter(visit.rule.number for visit in visits if visit.rule is not None and visit.inside is None)
    dead = {rule.number: _why_dead(rule, visits, named) for rule in rules if not fired[rule.number]}
    return Replay(tuple(visits), fired, dead)


def _named(rules: Sequence[KtRule], modules: Sequence[ModuleInfo]) -> Mapping[int, frozenset[str]]:
    """Return the paths that each rule with a name finds, by the rule's number."""
    with_name = [(rule, rule.name) for rule in rules if rule.name is not None]
    try:
        results = search([name for _, name in with_name], [module.fqn for module in modules])
    except TooMuchWork as error:
        rule, _ = with_name[error.index]
        raise InputRefused(Diagnostic("K009", f"rule {rule.number} is too much work: {error}", rule.span)) from error
    return {
        rule.number: paths
        for (rule, _), paths in zip(with_name, results, strict=True)
        if not isinstance(paths, Invalid)
    }


def _fits(rule: KtRule, module: ModuleInfo, named: Mapping[int, frozenset[str]]) -> bool:
    return _class_fits(rule, module) and (rule.name is None or module.fqn in named[rule.number])


def _class_fits(rule: KtRule, module: ModuleInfo) -> bool:
    return rule.class_ is None or names.spelling(rule.class_) in names.answers_to(module.class_name)


def _why_dead(rule: KtRule, visits: Sequence[Visit], named: Mapping[int, frozenset[str]]) -> str:
    of_class = [visit for visit in visits if _class_fits(rule, visit.module)]
    if not of_class:
        assert rule.class_ is not None
        short = rule.class_.rpartition(".")[2]
        hint = suggest(short, {visit.module.class_name for visit in visits})
        return f"this model has no module of the class `{short}`" + (f"; {hint}" if hint else "")
    both = [visit for visit in of_class if _fits(rule, visit.module, named)]
    if not both and rule.kind == "rope":
        return f"this model has one rotary embedding for all layers, `{of_class[-1].module.fqn}`"
    if not both:
        where = f" of the class `{rule.class_.rpartition('.')[2]}`" if rule.class_ else ""
        return f"its name fits no module{where}, for example not `{of_class[-1].module.fqn}`"
    winners = Counter(visit.rule.number for visit in both if visit.rule is not None)
    listed = ", ".join(str(number) for number in sorted(winners))
    return f"every module that it fits is taken by rule {listed}"

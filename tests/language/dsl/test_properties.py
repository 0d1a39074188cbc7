"""What holds for every program: printing keeps it, its layout is stable, the order of declarations means nothing."""

from __future__ import annotations

from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from dsl_programs import PARTS, expressions, modules, orders
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ktc.diagnostics import InputRefused
from ktc.language import dsl
from ktc.language.dsl import syntax
from ktc.language.dsl.formatter import format_text
from ktc.language.dsl.parser import parse, parse_value
from ktc.language.dsl.printer import print_expression, print_module
from ktc.language.dsl.ruleset import RuleSet

slow_or_shared = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
quickly = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=slow_or_shared)


@quickly
@given(modules)
def test_what_is_printed_parses_to_the_same_tree(module: syntax.Module) -> None:
    text = print_module(module)
    assert parse(text, "random.ktr") == module
    assert format_text(text, "random.ktr") == text


@quickly
@given(expressions)
def test_an_expression_survives_printing(expression: syntax.Expression) -> None:
    module = parse(f"require {print_expression(expression)}", "random.ktr")
    (require,) = module.declarations
    assert isinstance(require, syntax.Require)
    assert require.condition == expression
    if not isinstance(expression, syntax.Unary | syntax.Binary | syntax.Has):
        assert parse_value(print_expression(expression), "--set") == expression


@quickly
@given(modules, st.data())
def test_comments_survive_the_layout(module: syntax.Module, data: st.DataObject) -> None:
    lines = print_module(module).split("\n")
    for number in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(lines)))
        if place < len(lines) and "#" not in lines[place] and data.draw(st.booleans()):
            lines[place] += f" # {number} end"
        else:
            lines[place:place] = data.draw(st.sampled_from([[f"# {number}"], ["", f"  # {number} ", ""]]))
    text = "\n".join(lines)
    before, after = parse(text, "random.ktr"), format_text(text, "random.ktr")
    assert parse(after, "random.ktr") == before
    assert sorted(c.text.rstrip() for c in parse(after, "random.ktr").comments) == sorted(
        c.text.rstrip() for c in before.comments
    )
    assert format_text(after, "random.ktr") == after


@quickly
@given(order=orders)
def test_the_order_of_declarations_means_nothing(order: list[str], tmp_path: Path) -> None:
    assert meaning(load(tmp_path, order)) == meaning(load(tmp_path, PARTS))


@quickly
@given(st.lists(st.sampled_from(PARTS), unique=True), st.randoms())
def test_the_verdict_does_not_depend_on_the_order(parts: list[str], random: Random) -> None:
    shuffled = random.sample(parts, len(parts))
    assert verdict(parts) == verdict(shuffled)


def load(folder: Path, parts: list[str] | tuple[str, ...]) -> RuleSet:
    path = folder / "program.ktr"
    path.write_text("\n".join(parts))
    return dsl.load(path)


def meaning(ruleset: RuleSet) -> dict[str, object]:
    """Everything in a rule set but order and places."""
    rules = {
        rule.name: (
            rule.root, rule.at, rule.except_, rule.overrides, rule.declaration,
            tuple((a.target, a.facet, tuple(a.target.settings.items()), a.on) for a in rule.actions),
        )
        for rule in ruleset.rules
    }  # fmt: skip
    return {
        "rules": rules,
        "patterns": {name: pattern.declaration for name, pattern in ruleset.patterns.items()},
        "requires": {str(require) for _, require in ruleset.requires},
        "params": sorted((unit.prefix, *sorted(unit.params.items())) for unit in ruleset.units),
        "blocks": (ruleset.plan, ruleset.lora),
    }


def verdict(parts: list[str]) -> object:
    """The codes and messages of a program, or that it has none."""
    with TemporaryDirectory() as name:
        try:
            return sorted(w.message for w in load(Path(name), parts).warnings)
        except InputRefused as error:
            return sorted((d.code, d.message if d.code != "E040" else "") for d in error.diagnostics)

"""Do two selections of paths meet? The automata agree with trying every path of a small world."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ktc.language.dsl.checker.selectors import selection
from ktc.language.dsl.globs import matches
from ktc.language.dsl.intervals import ANY_LAYER, LAST, NO_LAYER, Layers, between
from ktc.language.dsl.parser import parse
from ktc.language.dsl.ruleset import RuleDefinition
from ktc.language.dsl.shared_path import Budget, OutOfBudget, Selection, shared_path
from ktc.language.dsl.syntax import Rule

WORDS = ("a", "ab", "abb", "b", "x", "0", "1", "2", "7")
WORLD = [".".join(path) for length in (1, 2, 3) for path in product(WORDS, repeat=length)]

segments = st.sampled_from(
    ["**", "*", "a", "a*", "*b", "a*b", "{a,x}", "{ab,b*}", "[0..1]", "[1..]", "[2..7]", "1", "b"]
)
globs = st.lists(segments, min_size=1, max_size=3).map(".".join)
layers = st.sampled_from([ANY_LAYER, between(0, 1), between(1, LAST), between(2, 2).negated(), NO_LAYER])
selections = st.builds(
    Selection, st.lists(globs, max_size=2).map(tuple), st.lists(globs, max_size=2).map(tuple), layers
)
quickly = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def selects(chosen: Selection, path: str) -> bool:
    number = next((int(part) for part in path.split(".") if part.isdigit()), None)
    in_layers = chosen.layers.without_number is True if number is None else chosen.layers.hold(number)
    wanted = not chosen.at or any(matches(glob, path) for glob in chosen.at)
    return in_layers and wanted and not any(matches(glob, path) for glob in chosen.except_)


@quickly
@given(selections, selections)
def test_a_path_is_found_where_there_is_one_and_is_one(first: Selection, second: Selection) -> None:
    found = shared_path((first, second), Budget(10**6))
    if found is not None:
        assert selects(first, found), found
        assert selects(second, found), found
    else:
        assert not [path for path in WORLD if selects(first, path) and selects(second, path)]


def test_a_search_ends_with_its_budget() -> None:
    hard = tuple(f"**.*{word}*.**.[{n}..].**" for n, word in enumerate(["ab", "ba", "aab", "bba"]))
    with pytest.raises(OutOfBudget):
        shared_path((Selection(hard), Selection(hard, ("**",))), Budget(1000))


@pytest.mark.parametrize(
    ("condition", "inside", "outside"),
    [
        ("l.layer < 3", [0, 2], [3, None]),
        ("3 <= l.layer and l.layer <= $n", [3, 5], [2, 6, None]),
        ("l.layer > 2.5", [3, 900], [2, None]),
        ("l.layer == 4 or l.layer in [7, 9]", [4, 7, 9], [5, 8, None]),
        ("not (l.layer in 2..4)", [0, 1, 5], [2, 4, None]),
        ("l.layer != 4 and l.layer not in 6..7", [0, 5, 8], [4, 6, 7, None]),
        ("$n == 5", [0, 7, None], []),
        ("$n > 5 or l.layer >= 1", [1], [0, None]),
        ("not ($n > 5) and 2 > l.layer", [0, 1], [2, None]),
    ],
)
def test_layers_of_a_condition(condition: str, inside: list[int | None], outside: list[int | None]) -> None:
    found = layers_of(condition)
    assert found is not None
    for layer in (*inside, *outside):
        held = found.without_number is True if layer is None else found.hold(layer)
        assert held == (layer in inside), layer


@pytest.mark.parametrize(
    "condition",
    ["l.bias", "l.layer < model.layers", "l.layer < 3 and l.bias", "not l.bias", "l.layer == l.bytes", "l has x",
     "model.layers in 1..l.layer", 'l.layer == "a"', "l.layer in [1, model.layers]"],
)  # fmt: skip
def test_other_conditions_are_left_to_the_match(condition: str) -> None:
    assert layers_of(condition) is None


def layers_of(condition: str) -> Layers | None:
    module = parse(f"rule r {{ match linear as l where {condition} => place(cpu) }}", "a.ktr")
    (declaration,) = module.declarations
    assert isinstance(declaration, Rule)
    rule = RuleDefinition("r", 0, declaration, "linear", (), (), frozenset(), ())
    found = selection(rule, {"n": 5})
    return found.layers if found else None

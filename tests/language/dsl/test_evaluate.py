"""Expressions are total: a missing fact makes a condition false, never an exception."""

from __future__ import annotations

import pytest

from ktc.language.dsl.evaluate import Result, constant, evaluate
from ktc.language.dsl.parser import parse
from ktc.language.dsl.syntax import Require
from ktc.model.targets.settings import Value

FACTS: dict[tuple[str, ...], Value] = {
    ("model", "type"): "deepseek_v2",
    ("model", "layers"): 27,
    ("m", "layer"): 3,
    ("m", "dtype"): "bf16",
    ("m", "has", "shared"): True,
    ("host", "isa", "has", "avx2"): True,
    ("host", "memory"): 64 * 2**30,
}
PARAMS: dict[str, Value] = {"split": 30, "kinds": ("bf16", "f16"), "half": 0.5}


def value(text: str) -> Result:
    declaration = parse(f"require {text}", "a.ktr").declarations[0]
    assert isinstance(declaration, Require)
    return evaluate(declaration.condition, PARAMS, FACTS.get)


@pytest.mark.parametrize(
    "text",
    [
        'model.type == "deepseek_v2"',
        "m.layer in 0..3 and m.layer not in [0, model.layers - 1]",
        "m.layer < $split and $half * 4 == 2",
        "m.dtype == bf16 and bf16 == m.dtype and m.dtype in $kinds",
        "m has shared and not (m has nothing) and host.isa has avx2",
        "host.memory >= 60GiB",
        "model.layers % 2 == 1 and model.layers / 2 == 13.5 and -model.layers < 0",
        "true or m.missing == 1",
    ],
)
def test_true_conditions(text: str) -> None:
    assert value(text) is True


@pytest.mark.parametrize(
    "text",
    [
        "m.missing == 1",
        "m.missing != 1",
        "not (m.missing == 1)",
        "m.missing in 1..3",
        "m.layer in m.missing..3",
        "m.layer / 0 == 1",
        "m.layer % 0 == 1",
        "$unknown > 3",
        "m.missing + 1 > 0",
        "m.missing == 1 and true",
        "1e308 * 1e308 - 1e308 * 1e308 == 0 or " + "*".join(["999999999999999999"] * 30) + " * 1.5 > 1",
    ],
)
def test_what_is_missing_or_undefined_is_not_true(text: str) -> None:
    assert not value(text)


def test_constants_and_ranges() -> None:
    assert value("1..$split") == range(1, 31)
    assert value("[1, $split, auto]") == (1, 30, "auto")
    declaration = parse("require model.type", "a.ktr").declarations[0]
    assert isinstance(declaration, Require)
    assert constant(declaration.condition, {}) is None

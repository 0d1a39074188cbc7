"""Path globs match whole paths, segment by segment, and refuse what is not a glob."""

from __future__ import annotations

import pytest
from work import calls

from ktc.language.dsl.globs import GlobError, compile_glob, matches


@pytest.mark.parametrize(
    ("glob", "path", "expected"),
    [
        ("model", "model", True),
        ("model", "model.layers", False),
        ("layers", "model.layers", False),
        ("model.layers.*.mlp", "model.layers.3.mlp", True),
        ("model.layers.*.mlp", "model.layers.3.self_attn.mlp", False),
        ("model.**", "model", True),
        ("model.**", "model.layers.3.mlp", True),
        ("**.mlp", "mlp", True),
        ("**.mlp.**", "model.layers.3.mlp.gate", True),
        ("**", "", True),
        ("*", "", False),
        ("**.{q,k}_proj", "model.layers.0.self_attn.k_proj", True),
        ("**.{q,k}_proj", "model.layers.0.self_attn.v_proj", False),
        ("**.*_a_*", "a.kv_a_proj", True),
        ("model.layers.[3..60].mlp", "model.layers.60.mlp", True),
        ("model.layers.[3..60].mlp", "model.layers.61.mlp", False),
        ("model.layers.[3..]", "model.layers.700", True),
        ("model.layers.[3..]", "model.layers.2", False),
        ("model.[0..9]", "model.x", False),
        ("model.[0..9]", "model.\u0663", False),
    ],
)
def test_matching(glob: str, path: str, expected: bool) -> None:
    assert matches(glob, path) is expected


@pytest.mark.parametrize(
    ("glob", "offset"),
    [
        ("model.(a|b)", 6),
        ("model.layers.[0-9]+", 18),
        ("a..b", 2),
        ("", 0),
        ("a.**b", 2),
        ("a.{b,c", 2),
        ("a.b}", 3),
        ("a.[9..3]", 2),
        ("a.x[1..2]", 2),
        ("a.*b*c*d*e*f", 2),
        ("a b", 1),
        ("x" * 513, 0),
        (".".join("x" * 33), 0),
    ],
)
def test_a_malformed_glob_is_refused_at_its_fault(glob: str, offset: int) -> None:
    with pytest.raises(GlobError) as refusal:
        compile_glob(glob)
    assert refusal.value.offset == offset
    assert refusal.value.length >= 1 or not glob


def test_the_worst_globs_are_still_fast() -> None:
    glob, name = ".".join(["**", "*a*a*a*a"] * 15), ".".join(["a" * 60 + "b"] * 60)
    assert not matches(glob, name)
    calls(lambda: matches(glob, name), most=20_000)  # about 4,000

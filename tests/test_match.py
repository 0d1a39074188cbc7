"""Matching promises: the std patterns fit by structure, name what they bind, and say how near they came where not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import CPU, captured, rules

from ktc.diagnostics import InputRefused
from ktc.match import NodeRef, SubMatch, match

EVERYTHING = """
rule experts { match moe.block as m  => cpu_moe() }
rule latent  { match attn.mla        expect >= 0 => keep(kernel) }
rule grouped { match attn.gqa        expect >= 0 => keep(kernel) }
"""


@pytest.mark.parametrize(
    ("family", "q_lora", "experts", "latent", "grouped"),
    [
        ("deepseek_v2", None, 2, 3, 0),
        ("deepseek_v2", 24, 2, 3, 0),
        ("deepseek_v3", 24, 2, 3, 0),
        ("qwen3_moe", None, 3, 0, 3),
    ],
)
def test_std_patterns_find_every_block_and_explain_all_of_it(
    tmp_path: Path, family: str, q_lora: int | None, experts: int, latent: int, grouped: int
) -> None:
    overrides: dict[str, object] = {} if family == "qwen3_moe" else {"q_lora_rank": q_lora}
    found = match(captured(family, torch.bfloat16, **overrides), rules(EVERYTHING, tmp_path), CPU)
    assert (len(found.of("experts")), len(found.of("latent")), len(found.of("grouped"))) == (experts, latent, grouped)
    assert {m.coverage for m in found.matches} == {1.0}


def test_a_match_names_what_it_bound(tmp_path: Path) -> None:
    model = captured("deepseek_v2")
    (first, _) = match(model, rules(EVERYTHING, tmp_path), CPU).of("experts")
    assert first.path == "model.layers.1.mlp"
    assert first.layer == 1
    assert first.capture(("experts",)) == NodeRef("experts")
    router = first.capture(("router",))
    assert isinstance(router, SubMatch)
    assert isinstance(router.bindings["gate"], NodeRef)
    assert "bias" not in router.bindings
    assert isinstance(first.capture(("shared", "down")), NodeRef)


def test_an_optional_part_is_absent_where_the_model_has_none(tmp_path: Path) -> None:
    found = match(captured("qwen3_moe"), rules(EVERYTHING, tmp_path), CPU).of("experts")
    assert found[0].capture(("shared",)) is None
    assert isinstance(found[0].capture(("router", "normed")), NodeRef)


def test_where_reads_attributes_of_roles_and_captures(tmp_path: Path) -> None:
    text = """
    rule a { match moe.block as m
             where m.top_k == 4 and m.num_experts == 16 and m has shared and m.layer > 1 => cpu_moe() }
    rule b { match attn.mla as a
             where a.kv_rank == 16 and a.rope_dim == 8 and a.nope_dim == 16 and a.heads == 4 and a.v_dim == 12
             => keep(kernel) }
    rule c { match linear as l at "**.o_proj" where l.in_features == 48 => lora_linear(rank = 4) }
    """
    found = match(captured("deepseek_v2"), rules(text, tmp_path), CPU)
    assert [m.path for m in found.of("a")] == ["model.layers.2.mlp"]
    assert (len(found.of("b")), len(found.of("c"))) == (3, 3)


def test_globs_select_paths_and_except_removes_them(tmp_path: Path) -> None:
    text = (
        'rule a { match linear at "model.layers.[1..2].self_attn.*" except "**.{o,q}_proj" => lora_linear(rank = 4) }'
    )
    found = match(captured("qwen3_moe"), rules(text, tmp_path), CPU)
    assert sorted(m.path.rpartition(".")[2] for m in found.matches) == ["k_proj", "k_proj", "v_proj", "v_proj"]


def test_leaves_outside_the_layers_are_found_too(tmp_path: Path) -> None:
    text = 'rule head { match linear at "lm_head" => keep(adapter) } rule table { match embedding => place(cpu) }'
    found = match(captured("qwen3_moe"), rules(text, tmp_path), CPU)
    assert [m.path for m in found.matches] == ["lm_head", "model.embed_tokens"]


def test_a_rule_that_matches_nothing_is_refused_with_its_nearest_miss(tmp_path: Path) -> None:
    with pytest.raises(InputRefused) as refused:
        match(captured("qwen3_moe"), rules("rule latent { match attn.mla => keep(kernel) }", tmp_path), CPU)
    (problem,) = refused.value.diagnostics
    assert problem.code == "M060"
    assert problem.message == "rule `latent` matched 0, expected at least 1"
    assert "model.layers.0.self_attn" in problem.hint
    assert "std/attention.ktr" in problem.hint
    assert problem.span is not None
    assert problem.span.file.endswith("program.ktr")


def test_all_unmet_expectations_are_told_together(tmp_path: Path) -> None:
    text = """
    rule a { match moe.block expect 7 => cpu_moe() }
    rule b { match attn.mla expect 1..2 => keep(kernel) }
    """
    with pytest.raises(InputRefused) as refused:
        match(captured("deepseek_v2"), rules(text, tmp_path), CPU)
    assert [d.message for d in refused.value.diagnostics] == [
        "rule `a` matched 2, expected 7",
        "rule `b` matched 3, expected 1..2",
    ]


def test_an_unmet_requirement_shows_what_was_found(tmp_path: Path) -> None:
    text = 'require model.type == "deepseek_v2" else "for V2 only"\nrule a { match moe.block => cpu_moe() }'
    with pytest.raises(InputRefused) as refused:
        match(captured("qwen3_moe"), rules(text, tmp_path), CPU)
    assert refused.value.diagnostics[0].code == "M063"
    assert "`model.type` is `qwen3_moe`" in refused.value.diagnostics[0].label


def test_a_dimension_is_the_last_one_unless_the_pattern_names_another(tmp_path: Path) -> None:
    text = """
    pattern along(x)  -> y { s = softmax(x, dim = -1)  y = topk(s) }
    pattern plain(x)  -> y { s = softmax(x)            y = topk(s) }
    pattern across(x) -> y { s = softmax(x, dim = 0)   y = topk(s) }
    rule a { match along  expect >= 0 => keep(kernel) }
    rule b { match plain  expect >= 0 => keep(adapter) }
    rule c { match across expect >= 0 => keep(quant) }
    """
    found = match(captured("qwen3_moe"), rules(text, tmp_path), CPU)
    assert (len(found.of("a")), len(found.of("b")), len(found.of("c"))) == (3, 3, 0)


def test_the_order_of_rules_does_not_matter(tmp_path: Path) -> None:
    model, declarations = captured("deepseek_v2"), EVERYTHING.strip().splitlines()
    forward = match(model, rules("\n".join(declarations), tmp_path), CPU)
    backward = match(model, rules("\n".join(reversed(declarations)), tmp_path), CPU)
    for rule in ("experts", "latent", "grouped"):
        assert forward.of(rule) == backward.of(rule)

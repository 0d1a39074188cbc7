"""Matching promises: the std patterns fit by structure, name what they bind, and say how near they came where not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import CPU, captured, rules

from ktc.diagnostics import InputRefused
from ktc.stages.match import NodeRef, SubMatch, match

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


@pytest.mark.parametrize(
    ("rule", "nearest"),
    [
        ('linear at "model.layer.*.self_attn.q_proj" => keep(quant)', "model.layers.*.self_attn.q_proj"),
        ('linear at "model.layers.*.attn.o_proj" => keep(quant)', "model.layers.*.self_attn.o_proj"),
        ('linear at "lm_haed" => keep(quant)', "lm_head"),
        ('module at "model.embed_token" => place(cpu)', "model.embed_tokens"),
    ],
)
def test_a_path_that_does_not_exist_is_answered_with_the_nearest(rule: str, nearest: str, tmp_path: Path) -> None:
    with pytest.raises(InputRefused) as refused:
        match(captured("qwen3_moe"), rules(f"rule a {{ match {rule} }}", tmp_path), CPU)
    (problem,) = refused.value.diagnostics
    assert (problem.code, problem.hint) == ("M060", f"the nearest path is `{nearest}`")


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


@pytest.mark.parametrize(
    ("root", "condition", "family", "count"),
    [
        ("moe.block", "m.scoring == softmax and m.hidden == 64 and m.inter == 48 and m.act == silu", "deepseek_v2", 2),
        ("moe.block", "m.scoring == sigmoid and m.router has bias", "deepseek_v3", 2),
        ("moe.block", 'm.class == "DeepseekV2Moe" and m.path == "model.layers.1.mlp"', "deepseek_v2", 1),
        ("moe.block", "m.experts.bytes == 294912 and m.dtype == bf16", "deepseek_v2", 2),
        # 512 tokens, 4 of 16 experts, 2 bytes a weight: 2 * 512 * 4 / 16 / 2
        ("moe.block", "m.experts.intensity == 128.0", "deepseek_v2", 2),
        ("moe.block", "m.router.gate.out_features == 16 and m.top_k < m.num_experts", "deepseek_v2", 2),
        ("attn.gqa", "m.heads == 4 and m.kv_heads == 2 and m.head_dim == 16", "qwen3_moe", 3),
        ("attn.gqa", "m.core.causal and m.core.scale == 0.25", "qwen3_moe", 3),
        ("attn.gqa", "m.q_norm.eps < 0.001", "qwen3_moe", 3),
        ("linear", "m.intensity == 512.0 and not m.bias", "qwen3_moe", 15),
        ("linear", "m.layer in [0, 2] and m.in_features in 64..64", "qwen3_moe", 10),
        ("embedding", "m.bytes > 0", "qwen3_moe", 1),
        ("rms_norm", "m.eps > 0", "qwen3_moe", 6),
        (
            "moe.block",
            "host.cores == 2 and host.numa == 1 and host.memory > 1GiB and host.isa has avx2",
            "qwen3_moe",
            3,
        ),
        ("moe.block", "host.isa has amx", "qwen3_moe", 0),
        ("moe.block", "gpu.count == 0 and not (gpu.memory > 1GiB)", "qwen3_moe", 0),
        (
            "moe.block",
            "model.layers == 3 and model.hidden == 64 and model.experts == 8 and model.dtype == bf16",
            "qwen3_moe",
            3,
        ),
    ],
)
def test_conditions_ask_captures_model_and_host(
    tmp_path: Path, root: str, condition: str, family: str, count: int
) -> None:
    text = f"rule a {{ match {root} as m where {condition} expect >= 0 => keep(quant) }}"
    assert len(match(captured(family), rules(text, tmp_path), CPU).of("a")) == count


@pytest.mark.parametrize(
    ("expect", "told"),
    [
        ("3", ""), ("!= 2", ""), ("< 4", ""), ("<= 3", ""), ("> 2", ""), (">= 3", ""), ("1..3", ""),
        ("model.layers", ""),
        ("2", "2"), ("!= 3", "other than 3"), ("< 3", "fewer than 3"), ("<= 2", "at most 2"), ("> 3", "at least 4"),
        (">= 4", "at least 4"), ("4..9", "4..9"), ("gpu.count", "0"),
    ],
)  # fmt: skip
def test_expectations_hold_or_say_what_they_wanted(tmp_path: Path, expect: str, told: str) -> None:
    program = rules(f"rule a {{ match moe.block expect {expect} => cpu_moe() }}", tmp_path)
    if not told:
        assert len(match(captured("qwen3_moe"), program, CPU).of("a")) == 3
        return
    with pytest.raises(InputRefused, match=f"matched 3, expected {told}"):
        match(captured("qwen3_moe"), program, CPU)


def test_attributes_and_constants_of_a_pattern_must_agree(tmp_path: Path) -> None:
    text = """
    pattern two(x)    -> y { y = topk(softmax(x), k = 2) }
    pattern three(x)  -> y { y = topk(softmax(x), k = 3) }
    pattern scaled(x) -> y { y = silu(x) * const() }
    pattern twice(x)  -> y { g = linear(x)  y = silu(g) * g }
    rule a { match two    expect >= 0 => keep(kernel) }
    rule b { match three  expect >= 0 => keep(adapter) }
    rule c { match scaled expect >= 0 => keep(quant) }
    rule d { match twice  expect >= 0 => keep(quant) }
    """
    found = match(captured("qwen3_moe", mlp_only_layers=[0]), rules(text, tmp_path), CPU)
    assert [len(found.of(rule)) for rule in "abcd"] == [2, 0, 0, 0]


def test_a_pattern_that_takes_too_many_steps_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktc.stages.match.term.STEP_BUDGET", 5)
    program = rules("rule a { match moe.block expect >= 0 => cpu_moe() }", tmp_path)
    assert match(captured("qwen3_moe"), program, CPU).of("a") == ()


def test_patterns_of_other_files_are_inlined_and_values_are_compared(tmp_path: Path) -> None:
    text = """
    pattern shared_beside(x) -> y {
      mlp = moe.gated_mlp(x)
      e   = experts(x, _, _, act = silu)
      y   = e + mlp
    }
    pattern twice(x) -> y {
      mlp = moe.gated_mlp(x)
      y   = mlp + mlp
    }
    pattern gelu_experts(x) -> y { y = experts(x, _, _, act = gelu) }
    pattern core(x) -> y { y = sdpa(_, _, linear(x), causal = true) }
    pattern second_of_topk(x) -> y { s = softmax(linear(x))  y = gather(s, s) }
    rule a { match shared_beside  expect >= 0 => keep(kernel) }
    rule b { match twice          expect >= 0 => keep(kernel) }
    rule d { match gelu_experts   expect >= 0 => keep(adapter) }
    rule e { match core           expect >= 0 => keep(quant) }
    rule f { match second_of_topk expect >= 0 => keep(quant) }
    """
    deepseek = match(captured("deepseek_v2"), rules(text, tmp_path), CPU)
    assert [len(deepseek.of(rule)) for rule in "abdef"] == [2, 0, 0, 0, 0]
    assert len(match(captured("qwen3_moe"), rules(text, tmp_path), CPU).of("e")) == 3


@pytest.mark.parametrize(
    "condition",
    [
        "model.layers in [1, 2]", "model.layers in 5..9", "not (model.hidden == 64)", "host.isa has amx",
        "model.layers > 2 and -model.layers > 0",
    ],
)  # fmt: skip
def test_an_unmet_requirement_of_any_form_shows_the_facts_it_asked_for(tmp_path: Path, condition: str) -> None:
    with pytest.raises(InputRefused) as refused:
        match(
            captured("qwen3_moe"),
            rules(f"require {condition}\nrule a {{ match moe.block => cpu_moe() }}", tmp_path),
            CPU,
        )
    assert refused.value.diagnostics[0].code == "M063"
    assert " is `" in refused.value.diagnostics[0].label


def test_a_requirement_that_is_neither_true_nor_false_is_not_met(tmp_path: Path) -> None:
    program = rules("require gpu.memory > 1GiB\nrule a { match moe.block => cpu_moe() }", tmp_path)
    with pytest.raises(InputRefused) as refused:
        match(captured("qwen3_moe"), program, CPU)  # it has no GPU, so no memory to compare
    (problem,) = refused.value.diagnostics
    assert (problem.code, problem.label) == ("M063", "`gpu.memory` is `None`")

"""The plan of `sparse_attention`: what it refuses, which layers stay dense, its kernel, and what it says."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
from families import CPU, planned, rules
from families import captured as embedded

from ktc.diagnostics import InputRefused
from ktc.foundation.host import Gpu
from ktc.model.graph import ops
from ktc.model.graph.typed import nodes_of
from ktc.model.targets import FusedAttention, MlaAbsorbed, SparseAttention
from ktc.model.targets.target import Target
from ktc.stages.capture import CapturedModel, capture, open_model
from ktc.stages.plan.types import Plan
from ktc.stages.rewrite import rewrite

EXPERTS = "rule e { match moe.block => cpu_moe() }\n"


@functools.cache
def captured(family: str) -> CapturedModel:
    if family in ("qwen3_moe", "deepseek_v2"):
        return embedded(family)
    return capture(open_model(f"tiny:{family}", fetch_weights=False))


def sparse(pattern: str, settings: str = "", more: str = "") -> str:
    return f"{EXPERTS}rule long {{ match attn.{pattern} {more} => sparse_attention({settings}) }}\n"


def targets(plan: Plan) -> dict[str, Target]:
    """The target of attention by the site of its layer."""
    return {
        site.fqn: action.target
        for rewrite in plan.rewrites
        for site in rewrite.sites
        for action in rewrite.actions
        if not action.target.takes_experts
    }


@pytest.mark.parametrize(("family", "pattern", "dense"), [
    ("qwen3_moe", "gqa", FusedAttention), ("deepseek_v2", "mla", MlaAbsorbed)
])  # fmt: skip
def test_the_first_layers_stay_dense(family: str, pattern: str, dense: type[Target], tmp_path: Path) -> None:
    model = captured(family)
    _, plan = planned(model, rules(sparse(pattern, "dense_layers = 1"), tmp_path))
    found = list(targets(plan).values())
    assert isinstance(found[0], dense)
    assert all(isinstance(each, SparseAttention) for each in found[1:])
    assert any(spec.op == "sparse_attention" for spec in plan.kernels)
    assert any("stays dense" in reason.text and reason.path.endswith("layers.0.self_attn") for reason in plan.reasons)
    nodes = [node for block in rewrite(model, plan) for node in nodes_of(block.graph)]
    (node, *_) = [node for node in nodes if ops.operator(node) == "sparse_attention"]
    assert (ops.attributes(node)["k"], ops.attributes(node)["index"]) == (2048, "int4")
    assert ops.attributes(node)["shared"] == (pattern == "mla")


def test_the_plan_says_what_is_read_and_counts_the_index(tmp_path: Path) -> None:
    model = captured("deepseek_v2")
    _, plan = planned(model, rules(sparse("mla", "dense_layers = 0"), tmp_path))
    (told,) = {reason.text for reason in plan.reasons if "index" in reason.text}
    assert "read 2,048 positions by an index of int4 codes" in told
    assert "the first 64 and the last 256" in told
    assert "MB at 131,072 positions" in told
    _, dense = planned(model, rules(EXPERTS + "rule a { match attn.mla => mla_absorbed() }", tmp_path))
    assert cache_of(plan) > cache_of(dense), "an index is a part of the cache"


def cache_of(plan: Plan) -> int:
    use = next(use for use in plan.memory.workloads if use.name.startswith("infer"))
    return sum(held.get("cache", 0) for held in use.needs.values())


def test_a_trained_indexer_chooses(tmp_path: Path) -> None:
    _, plan = planned(captured("deepseek_v32"), rules(sparse("mla", "dense_layers = 0"), tmp_path))
    assert any("the model's own trained indexer chooses" in reason.text for reason in plan.reasons)


@pytest.mark.parametrize(("family", "pattern", "why"), [
    ("gemma2", "gqa", "soft cap"), ("gpt_oss", "gqa", "sliding window"),
])  # fmt: skip
def test_attention_that_is_more_than_products_is_refused(family: str, pattern: str, why: str, tmp_path: Path) -> None:
    text = sparse(pattern) if family != "gemma2" else sparse(pattern).replace(EXPERTS, "")
    with pytest.raises(InputRefused) as refused:
        planned(captured(family), rules(text, tmp_path))
    (problem, *_) = refused.value.diagnostics
    assert problem.code == "M083"
    assert problem.span is not None
    assert why in problem.message


def test_a_rule_that_may_match_nothing_leaves_it_dense(tmp_path: Path) -> None:
    _, plan = planned(captured("gpt_oss"), rules(sparse("gqa", "dense_layers = 0", "expect >= 0"), tmp_path))
    (warning,) = [each for each in plan.warnings if each.code == "M083"]
    assert "sliding window" in warning.message
    assert any(isinstance(each, SparseAttention) for each in targets(plan).values()), "its full layers are sparse"


def test_on_a_gpu_pytorch_computes_it(tmp_path: Path) -> None:
    text = sparse("gqa", "dense_layers = 1") + 'rule all { match module at "model", "lm_head" => place(cuda:0) }'
    _, plan = planned(captured("qwen3_moe"), rules(text, tmp_path), replace(CPU, gpus=(Gpu("test", 24 << 30),)))
    assert not any(spec.op == "sparse_attention" for spec in plan.kernels)
    told = [reason.text for reason in plan.reasons if "by PyTorch in steps that are not recorded" in reason.text]
    assert told and all("keys of 16 numbers" in text for text in told)
    assert len(targets(plan)) == captured("qwen3_moe").model.config.num_hidden_layers


@pytest.mark.parametrize(("setting", "code", "gpus"), [("cuda_graph", "M082", 1), ("native_step", "M084", 0)])
def test_steps_of_sparse_attention_are_not_captured(setting: str, code: str, gpus: int, tmp_path: Path) -> None:
    more = f"""
    param device : device = auto
    rule all {{ match module at "model", "lm_head" => place($device) }}
    plan {{ mode = infer  {setting} = decode }}
    """
    host = replace(CPU, gpus=(Gpu("test", 24 << 30),) * gpus)
    _, plan = planned(captured("qwen3_moe"), rules(sparse("gqa") + more, tmp_path), host)
    (told,) = [warning.message for warning in plan.warnings if warning.code == code]
    assert "is sparse, and chooses other positions in each step" in told
    assert not plan.cuda_graph and not plan.native_step

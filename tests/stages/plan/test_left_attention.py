"""Attention that keeps its own code, with the reason: a function of the model's own, a module at several places."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from families import captured, planned, rules
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

from ktc.diagnostics import InputRefused
from ktc.model.attention.interface import stock_function, unknown_function
from ktc.model.targets import FusedAttention, LoraLinear, MlaAbsorbed, SparseAttention
from ktc.stages.capture import CapturedModel
from ktc.stages.plan.types import Plan

EXPERTS = "rule e { match moe.block => cpu_moe() }\n"
GQA = """rule a {
  match attn.gqa as a
  expect >= 0
  => lora_linear(rank = 8) on a.q, a.v
  => fused_attention(flash_decode)
}
"""
MLA = "rule a { match attn.mla  expect >= 0  => mla_absorbed() }\n"
SPARSE = "rule a { match attn.gqa  expect >= 0  => sparse_attention() }\n"


def capped(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: Any) -> Any:
    """An attention function as an author registers it."""
    raise NotImplementedError("only its name is read")


def targets(plan: Plan) -> set[type]:
    return {type(action.target) for rewrite in plan.rewrites for action in rewrite.actions}


def choosing(model: CapturedModel, implementation: str) -> CapturedModel:
    """The model, with a config that names `implementation`."""
    chosen = copy.deepcopy(model.model)
    for module in chosen.modules():
        if (config := getattr(module, "config", None)) is not None:
            config._attn_implementation_internal = implementation
    return replace(model, model=chosen)


@pytest.mark.parametrize(("family", "text", "core"), [
    ("qwen3_moe", GQA, FusedAttention), ("deepseek_v2", MLA, MlaAbsorbed), ("qwen3_moe", SPARSE, SparseAttention)
])  # fmt: skip
def test_a_function_that_the_model_chooses_is_left_and_told(family: str, text: str, core: type, tmp_path: Path) -> None:
    model = captured(family)
    program = rules(EXPERTS + text, tmp_path)
    _, before = planned(model, program)
    _, plan = planned(choosing(model, "capped"), program)
    assert targets(before) - targets(plan) >= {core}
    assert not targets(plan) & {FusedAttention, MlaAbsorbed, SparseAttention}
    (told,) = {w.message for w in plan.warnings if w.code == "M092"}
    assert told.endswith(f"without `{core.name}`: the model chooses the attention function `capped`")  # type: ignore[attr-defined]
    if text == GQA:
        assert LoraLinear in targets(plan), "projections are rewritten as elsewhere"


def test_a_rule_that_expects_matches_is_refused(tmp_path: Path) -> None:
    model = choosing(captured("qwen3_moe"), "flex_attention")
    with pytest.raises(InputRefused, match="M092") as refused:
        planned(model, rules(EXPERTS + GQA.replace("expect >= 0", ""), tmp_path))
    assert "`flex_attention`" in refused.value.diagnostics[0].message


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_function_under_the_name_of_a_stock_one_is_seen(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = choosing(captured("qwen3_moe"), implementation).model.get_submodule("model.layers.0.self_attn")
    assert unknown_function(module) == ""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, implementation, capped)
    assert unknown_function(module) == f"`{implementation}` attention is the model's own function `capped`"


class _Derived(qwen.Qwen3MoeAttention):
    """Attention of another file, which inherits its forward."""


class _Nameless(qwen.Qwen3MoeAttention):
    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        return hidden_states


def test_eager_attention_is_the_function_that_the_code_of_the_class_names() -> None:
    def attention(of: type[qwen.Qwen3MoeAttention]) -> Any:
        module: Any = of.__new__(of)
        vars(module)["stock_config"] = SimpleNamespace(_attn_implementation="eager")
        return module

    assert stock_function(attention(_Derived)) is qwen.eager_attention_forward
    with pytest.raises(InputRefused, match="L450: `_Nameless` names no function for `eager` attention"):
        stock_function(attention(_Nameless))


@pytest.mark.parametrize("name", ["self_attn", "self_attn.q_proj"])
def test_a_module_at_several_places_is_left_and_told(name: str, tmp_path: Path) -> None:
    model = captured("qwen3_moe")
    shared = copy.deepcopy(model.model)
    shared.set_submodule(f"model.layers.1.{name}", shared.get_submodule(f"model.layers.0.{name}"))
    model = replace(model, model=shared)
    _, plan = planned(model, rules(EXPERTS + GQA, tmp_path))
    (told,) = {w.message for w in plan.warnings if w.code == "M093"}
    assert told.endswith(f"`model.layers.0.{name}`, `model.layers.1.{name}` are one module")
    assert plan.lora is not None
    assert not {f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)} & set(plan.lora.targets)
    assert "model.layers.2.self_attn.q_proj" in plan.lora.targets
    with pytest.raises(InputRefused, match="M093"):
        planned(model, rules(EXPERTS + GQA.replace("expect >= 0", ""), tmp_path))


def test_a_program_of_which_nothing_is_left_says_why(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="M071") as refused:
        planned(choosing(captured("deepseek_v2"), "capped"), rules(MLA, tmp_path))
    assert "the model chooses the attention function `capped`" in refused.value.diagnostics[0].hint


def test_rules_that_train_and_match_nothing_are_told(tmp_path: Path) -> None:
    adapting = "rule a { match attn.mla as a  expect >= 0  => lora_linear(rank = 8) on a.o }\n"
    _, plan = planned(captured("qwen3_moe"), rules(EXPERTS + adapting, tmp_path))
    assert plan.lora is None
    assert [each.code for each in plan.warnings] == ["M094"]
    _, plan = planned(captured("qwen3_moe"), rules(EXPERTS, tmp_path))
    assert "M094" not in [each.code for each in plan.warnings]

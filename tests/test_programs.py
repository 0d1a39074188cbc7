"""Every shipped program is planned at the depth and widths of the real model it is written for, on meta tensors."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from families import CPU
from transformers import AutoConfig, PretrainedConfig

from ktc import dsl, resources
from ktc.capture import CapturedModel, ModelSource, capture
from ktc.diagnostics import InputRefused
from ktc.host import Gpu
from ktc.match import match
from ktc.plan import Plan, make_plan

BIG_HOST = replace(CPU, memory=2048 << 30, gpus=(Gpu("a", 24 << 30), Gpu("b", 24 << 30)), cores=64, threads=64, numa=2)
REAL: dict[str, tuple[str, dict[str, object]]] = {
    "deepseek-v2-lite": (
        "deepseek_v2",
        {
            "hidden_size": 2048, "num_hidden_layers": 27, "intermediate_size": 10944, "moe_intermediate_size": 1408,
            "vocab_size": 102400, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2,
            "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128, "v_head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 16,
            "topk_method": "greedy", "n_group": 1, "topk_group": 1,
        },
    ),
    "deepseek-v3": ("deepseek_v3", {}),
    "kimi-k2": (
        "deepseek_v3",
        {
            "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "n_group": 1,
            "topk_group": 1, "first_k_dense_replace": 1, "vocab_size": 163840, "routed_scaling_factor": 2.827,
        },
    ),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {
            "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
            "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
            "norm_topk_prob": True, "vocab_size": 151936,
        },
    ),
}  # fmt: skip
PROGRAMS = {
    "deepseek-v2-lite-lora": "deepseek-v2-lite",
    "deepseek-v3-multi-gpu-lora": "deepseek-v3",
    "kimi-k2-lora": "kimi-k2",
    "qwen3-moe-lora": "qwen3-30b-a3b",
    "qwen3-moe-int4-qat": "qwen3-30b-a3b",
    "mla-inference": "deepseek-v3",
    "moe-lora": "deepseek-v3",
    "moe-experts-lora": "qwen3-30b-a3b",
}


def config(model: str) -> PretrainedConfig:
    family, fields = REAL[model]
    found = AutoConfig.for_model(family, **fields)
    found.dtype = torch.bfloat16
    return found


@cache
def captured(model: str) -> CapturedModel:
    return capture(ModelSource(model, None, config(model), None))


def plan(program: str, model: str) -> Plan:
    rules = dsl.load(program, {})
    return make_plan(captured(model), (), match(captured(model), rules, BIG_HOST), rules, BIG_HOST)


def test_every_shipped_program_is_here() -> None:
    assert {path.stem for path in resources.rules().glob("*.ktr")} == set(PROGRAMS)


@pytest.mark.parametrize(("program", "model"), PROGRAMS.items())
def test_a_shipped_program_plans_its_real_model(program: str, model: str) -> None:
    made = plan(program, model)
    layers = config(model).num_hidden_layers
    dense = getattr(config(model), "first_k_dense_replace", 0)
    experts = [site for r in made.rewrites for site in r.sites if any(a.target == "cpu_moe" for a in r.actions)]
    assert len(experts) == layers - dense
    if "lora" in program:
        assert made.lora is not None
        assert len(made.lora.targets) == layers * (4 if model in ("deepseek-v2-lite", "qwen3-30b-a3b") else 5)
        assert len(made.lora.parameters) == (2 * len(experts) if "experts" in program else 0)


@pytest.mark.parametrize("program", ["deepseek-v2-lite-lora", "qwen3-moe-lora", "qwen3-moe-int4-qat"])
def test_a_program_for_one_family_refuses_another_by_its_requirement(program: str) -> None:
    rules = dsl.load(program, {})
    with pytest.raises(InputRefused) as refused:
        match(captured("deepseek-v3"), rules, BIG_HOST)
    assert refused.value.diagnostics[0].code == "M063"


def test_deepseek_v3_on_two_gpus_has_the_published_footprint() -> None:
    loads = {load.device: load.weights / 2**30 for load in plan("deepseek-v3-multi-gpu-lora", "deepseek-v3").devices}
    assert loads == pytest.approx({"cuda:0": 15.0, "cuda:1": 15.2, "cpu": 1219.7}, abs=0.1)

"""Every shipped program is planned at the depth and widths of the real model it is written for, on meta tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from families import CPU, full_size
from transformers import AutoConfig

from ktc.diagnostics import InputRefused
from ktc.foundation import resources
from ktc.foundation.host import Gpu
from ktc.language import dsl
from ktc.stages.capture import CapturedModel, ModelSource, capture
from ktc.stages.match import match
from ktc.stages.plan import Plan, make_plan

BIG_HOST = replace(CPU, memory=2048 << 30, gpus=(Gpu("a", 24 << 30), Gpu("b", 24 << 30)), cores=64, threads=64, numa=2)
PROGRAMS = {
    "auto": "deepseek-v3",
    "deepseek-v2-lite-lora": "deepseek-v2-lite",
    "deepseek-v3-multi-gpu-lora": "deepseek-v3",
    "kimi-k2-lora": "kimi-k2",
    "qwen3-moe-lora": "qwen3-30b-a3b",
    "qwen3-moe-int4-qat": "qwen3-30b-a3b",
    "mla-inference": "deepseek-v3",
    "moe-lora": "deepseek-v3",
    "moe-experts-lora": "qwen3-30b-a3b",
    "moe-inference": "deepseek-v3",
    "moe-qat": "qwen3-30b-a3b",
}


def plan(program: str, model: CapturedModel) -> Plan:
    rules = dsl.load(program, {})
    return make_plan(model, (), match(model, rules, BIG_HOST), rules, BIG_HOST)


def test_every_shipped_program_is_here() -> None:
    assert {path.stem for path in resources.rules().glob("*.ktr")} == set(PROGRAMS)


@pytest.mark.parametrize(("program", "model"), PROGRAMS.items())
def test_a_shipped_program_plans_its_real_model(program: str, model: str) -> None:
    made = plan(program, full_size(model))
    config = full_size(model).source.config
    layers, dense = config.num_hidden_layers, getattr(config, "first_k_dense_replace", 0)
    experts = [site for r in made.rewrites for site in r.sites if any(a.target.takes_experts for a in r.actions)]
    assert len(experts) == layers - dense
    if "lora" in program or program == "auto":
        assert made.lora is not None
        assert len(made.lora.targets) == layers * (4 if model in ("deepseek-v2-lite", "qwen3-30b-a3b") else 5)
        assert len(made.lora.parameters) == (2 * len(experts) if "experts" in program else 0)


@pytest.mark.parametrize("program", ["deepseek-v2-lite-lora", "qwen3-moe-lora", "qwen3-moe-int4-qat"])
def test_a_program_for_one_family_refuses_another_by_its_requirement(program: str) -> None:
    rules = dsl.load(program, {})
    with pytest.raises(InputRefused) as refused:
        match(full_size("deepseek-v3"), rules, BIG_HOST)
    assert refused.value.diagnostics[0].code == "M063"


def test_deepseek_v3_on_two_gpus_has_the_published_footprint() -> None:
    config = AutoConfig.for_model("deepseek_v3")  # published for bf16; the checkpoint of the makers is fp8
    config.dtype = torch.bfloat16
    made = plan("deepseek-v3-multi-gpu-lora", capture(ModelSource("deepseek-v3", None, config, None)))
    loads = {load.device: load.weights / 2**30 for load in made.devices}
    assert loads == pytest.approx({"cuda:0": 15.0, "cuda:1": 15.2, "cpu": 1219.7}, abs=0.1)

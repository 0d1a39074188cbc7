"""Every shipped program is planned at the depth and widths of the real model it is written for, on meta tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import CPU, full_size
from transformers import AutoConfig

from ktc.diagnostics import InputRefused
from ktc.foundation import resources
from ktc.foundation.host import Gpu
from ktc.language import dsl
from ktc.language.dsl.former_names import FORMER
from ktc.stages.capture import CapturedModel, ModelSource, capture
from ktc.stages.match import match
from ktc.stages.plan import Plan, make_plan

BIG_HOST = replace(CPU, memory=2048 << 30, gpus=(Gpu("a", 24 << 30), Gpu("b", 24 << 30)), cores=64, threads=64, numa=2)
PROGRAMS = {
    "auto": "deepseek-v3",
    "moe-lora": "deepseek-v3",
    "moe-experts-lora": "qwen3-30b-a3b",
    "moe-inference": "deepseek-v3",
    "moe-qat": "qwen3-30b-a3b",
}
EXAMPLES = {
    "deepseek-v2-lite-lora": "deepseek-v2-lite",
    "deepseek-v3-multi-gpu-lora": "deepseek-v3",
    "qwen3-moe-int4-qat": "qwen3-30b-a3b",
}


def load(program: str, settings: dict[str, str] | None = None) -> dsl.RuleSet:
    example = resources.examples() / f"{program}.ktr"
    return dsl.load(example if program in EXAMPLES else program, settings or {})


def plan(program: str, model: CapturedModel, settings: dict[str, str] | None = None) -> Plan:
    rules = load(program, settings)
    return make_plan(model, (), match(model, rules, BIG_HOST), rules, BIG_HOST)


def test_every_shipped_program_and_every_example_is_here() -> None:
    assert set(dsl.bundled()) == set(PROGRAMS)
    assert {path.stem for path in resources.examples().glob("*.ktr")} == set(EXAMPLES)


@pytest.mark.parametrize("program", EXAMPLES)
def test_an_example_is_accepted_without_a_warning(program: str) -> None:
    assert load(program).warnings == ()


@pytest.mark.parametrize(("program", "model"), [*PROGRAMS.items(), *EXAMPLES.items()])
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


def test_a_program_for_another_family_or_use_names_the_bundled_ones_that_fit(tmp_path: Path) -> None:
    answers = tmp_path / "answers.ktr"
    answers.write_text('require model.type == "other"\nplan { mode = infer }\n')
    for rules, fits in (
        (load("deepseek-v2-lite-lora"), "`auto`, `moe-experts-lora`, `moe-lora`, `moe-qat`"),
        (load("qwen3-moe-int4-qat"), "`auto`, `moe-experts-lora`, `moe-lora`, `moe-qat`"),
        (dsl.load(answers), "`auto`, `moe-inference`"),
    ):
        with pytest.raises(InputRefused) as refused:
            match(full_size("deepseek-v3"), rules, BIG_HOST)
        (problem,) = refused.value.diagnostics
        assert (problem.code, problem.hint) == ("M063", f"bundled programs that fit: {fits}")


@pytest.mark.parametrize("name", FORMER)
def test_a_former_name_works_and_names_its_successor(name: str) -> None:
    rules = dsl.load(name, {})
    warning, *others = rules.warnings
    assert (warning.code, warning.severity, others) == ("U007", "warning", [])
    successor = FORMER[name]
    words = successor.program or f"docs/examples/{name}.ktr"
    assert f"instead: `ktc compile MODEL {words}" in warning.hint
    assert rules.settings == successor.settings


@pytest.mark.parametrize("experts", ["cpu", "auto"])
def test_one_program_answers_with_every_kind_of_attention_on_either_device(experts: str) -> None:
    """On a GPU, PyTorch computes linear layers; kernels of attention and absorbed latents are on both."""
    for name, kinds in (("deepseek-v3", {"mla_absorbed"}), ("qwen3-30b-a3b", {"fused_attention"})):
        made = plan("moe-inference", full_size(name), {"experts": experts})
        targets = {action.target.name for rewrite in made.rewrites for action in rewrite.actions}
        assert targets == kinds | {"fused"} | ({"cpu_moe"} if experts == "cpu" else set())  # fused: its routers
        assert made.cuda_graph
    long = plan("moe-inference", full_size("deepseek-v3"), {"context": "131072", "device": "cpu"})
    sparse = [s for r in long.rewrites for s in r.sites if any(a.target.name == "sparse_attention" for a in r.actions)]
    assert len(sparse) == 29


def test_a_format_of_experts_that_pytorch_computes_is_refused() -> None:
    model, settings = full_size("qwen3-30b-a3b"), {"experts": "auto", "format": "mxfp4"}
    with pytest.raises(InputRefused) as refused:
        plan("moe-inference", model, settings)
    (problem,) = refused.value.diagnostics
    assert problem.code == "M063" and "for `format` leave it out" in problem.message
    assert plan("moe-inference", model, {"experts": "cpu", "format": "mxfp4"}).rewrites


@pytest.mark.parametrize(("use", "adapters"), [("train", 61 * 5), ("generate", 0), ("serve", 0)])
def test_auto_has_the_targets_of_its_use(use: str, adapters: int) -> None:
    made = make_plan_on_cpu("auto", {"use": use})
    assert (len(made.lora.targets) if made.lora else 0) == adapters
    targets = {action.target.name for rewrite in made.rewrites for action in rewrite.actions}
    assert ("mla_absorbed" in targets, made.native_step) == (use != "train",) * 2
    assert targets >= {"cpu_moe", "kt_linear"}


def make_plan_on_cpu(program: str, settings: dict[str, str]) -> Plan:
    rules, host, model = load(program, settings), replace(BIG_HOST, gpus=()), full_size("deepseek-v3")
    return make_plan(model, (), match(model, rules, host), rules, host)


def test_deepseek_v3_on_two_gpus_has_the_published_footprint() -> None:
    config = AutoConfig.for_model("deepseek_v3")  # published for bf16; the checkpoint of the makers is fp8
    config.dtype = torch.bfloat16
    made = plan("deepseek-v3-multi-gpu-lora", capture(ModelSource("deepseek-v3", None, config, None)))
    loads = {load.device: load.weights / 2**30 for load in made.devices}
    assert loads == pytest.approx({"cuda:0": 15.0, "cuda:1": 15.2, "cpu": 1219.7}, abs=0.1)

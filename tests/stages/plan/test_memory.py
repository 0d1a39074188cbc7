"""The memory plan promises: true counts of bytes and parameters, and sizes of input that fit where it says so."""

from __future__ import annotations

import resource
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from families import CPU, captured, config_of, full_size, planned, rules
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from ktc.foundation.host import Gpu
from ktc.language import dsl
from ktc.model.graph.typed import nodes_of
from ktc.model.hf.logit_tiles import MICRO_BATCHES, step_bytes, tile_bytes, tokens_of_run
from ktc.stages.link.adapter import adapter_json
from ktc.stages.match import Matches, match
from ktc.stages.plan import BatchShape, MemoryPlan, make_plan
from ktc.stages.plan.memory import over_budget
from ktc.stages.plan.types import DeviceMemory
from ktc.training.tune.settings import TrainSettings

BIG = replace(CPU, memory=1536 << 30, gpus=(Gpu("a", 80 << 30),), cores=64, threads=64)
# Published: parameters in all, active per token (GLM-4.5's makers leave the head out); programs that fit the model.
PUBLISHED = {
    "deepseek-v3": (671e9, 37e9, ("moe-lora", "moe-inference")),
    "kimi-k2": (1.03e12, 32e9, ("moe-lora",)),
    "qwen3-235b-a22b": (235e9, 22e9, ("moe-lora", "moe-qat")),
    "glm-4.5": (355e9, 32e9, ("moe-lora",)),
}
# The quick tests take one model with latent and one with grouped-query attention.
SLOW = ("kimi-k2", "glm-4.5")


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if name in SLOW else []


NAMES = [pytest.param(name, marks=marks(name)) for name in PUBLISHED]


@cache
def matched(name: str, program: str) -> tuple[dsl.RuleSet, Matches]:
    found = dsl.load(program, {})
    return found, match(full_size(name), found, BIG)


@cache
def memory(name: str, program: str = "moe-lora", asked: BatchShape | None = None) -> MemoryPlan:
    found, matches = matched(name, program)
    return make_plan(full_size(name), (), matches, found, BIG, asked or BatchShape()).memory


@pytest.mark.parametrize("name", NAMES)
def test_a_full_depth_model_is_captured_in_few_graphs_and_little_memory(name: str) -> None:
    model = full_size(name)
    assert len(model.sites) == 2 * model.facts["layers"]
    assert len(model.blocks) <= 3
    assert all(block.graph is not None and len(nodes_of(block.graph)) < 100 for block in model.blocks)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 6 << 20  # KiB, of the whole test process


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_those_that_were_published(name: str) -> None:
    total, active, _ = PUBLISHED[name]
    found = memory(name)
    assert found.parameters == pytest.approx(total, rel=0.01)
    assert found.active == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize(
    ("name", "program"), [pytest.param(n, p, marks=marks(n)) for n, row in PUBLISHED.items() for p in row[2]]
)
def test_what_fits_fits_and_one_more_does_not(name: str, program: str) -> None:
    for number, use in enumerate(memory(name, program).workloads):
        if use.max_length:
            at_most = memory(name, program, BatchShape(1, use.max_length)).workloads[number]
            assert not at_most.shortfall
        if use.bound != "the model":
            beyond = memory(name, program, BatchShape(1, use.max_length + 1)).workloads[number]
            assert use.bound in beyond.shortfall
        if use.max_batch:
            assert not memory(name, program, BatchShape(use.max_batch, use.length)).workloads[number].shortfall
        assert memory(name, program, BatchShape(use.max_batch + 1, use.length)).workloads[number].shortfall


def test_caches_are_those_of_the_attention() -> None:
    expected = {"deepseek-v3": [2 * (512 + 64)] * 61, "qwen3-235b-a22b": [2 * 2 * 4 * 128] * 94}
    for name, per_token in expected.items():
        assert [layer.per_token for layer in full_size(name).cache or ()] == per_token


def test_a_sliding_window_is_cached_up_to_its_width() -> None:
    layers = captured("gpt_oss", sliding_window=32).cache
    assert layers is not None
    assert {layer.window for layer in layers} == {None, 32}
    assert len({layer.per_token for layer in layers}) == 1


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "qwen3_moe"])
def test_the_planned_adapter_has_as_many_parameters_as_peft_makes(family: str) -> None:
    _, plan = planned(captured(family), dsl.load("moe-lora", {}))
    assert plan.lora is not None
    settings = adapter_json(plan.lora)
    stock = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.bfloat16)
    trained = [p for p in get_peft_model(stock, LoraConfig(**settings)).parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == plan.lora.trainable
    assert {p.dtype for p in trained} == {torch.float32}
    (load,) = plan.devices
    assert load.adapter == sum(4 * p.numel() * p.element_size() for p in trained)


def test_tied_embeddings_are_counted_once() -> None:
    untied, tied = (
        planned(captured("qwen3_moe", tie_word_embeddings=t), dsl.load("moe-lora", {})) for t in (False, True)
    )
    table = 128 * 64
    assert untied[1].memory.parameters - tied[1].memory.parameters == table
    assert untied[1].memory.active == tied[1].memory.active
    assert untied[1].devices[0].weights - tied[1].devices[0].weights == 2 * table


def test_an_input_that_does_not_fit_is_told_with_the_largest_that_does(tmp_path: Path) -> None:
    program = rules("rule e { match moe.block => cpu_moe() }", tmp_path)
    model = captured("deepseek_v2")
    small = replace(CPU, memory=2 << 20)
    asked = BatchShape(64, 512)
    plan = make_plan(model, (), match(model, program, small), program, small, asked)
    (problem,) = plan.over_budget
    assert problem.code == "M075"
    assert "batch 64 and length 512 is short of" in problem.message
    use = plan.memory.workloads[-1]
    assert use.max_length > 0
    assert f"length {use.max_length} at batch 1" in problem.hint


def test_a_device_has_to_hold_its_adapter_as_well_when_training() -> None:
    held = MemoryPlan(0, 0, (DeviceMemory("cpu", 3 << 30, {"experts": 2 << 30}, 2 << 30),), (), ())
    (problem,) = over_budget(held, "train", BatchShape())
    assert problem.code == "M070"
    assert "2.0 GiB of weights and 2.0 GiB for its adapter on `cpu`" in problem.message
    assert over_budget(held, "infer", BatchShape()) == ()


def test_training_on_long_sequences_counts_logits_in_tiles_of_tokens() -> None:
    name = "qwen3-235b-a22b"
    short, long = (memory(name, asked=BatchShape(1, length)).workloads[1].needs["cuda:0"] for length in (64, 32_768))
    assert short["logits"] > 0, "the head is on this device"
    assert long["logits"] <= short["logits"] < 5 << 30  # all logits of 32,768 tokens take 80 GB in training


def test_training_on_short_sequences_counts_the_loss_of_micro_batches_that_share_a_run() -> None:
    needs = memory("qwen3-235b-a22b", asked=BatchShape(1, 64)).workloads[1].needs["cuda:0"]
    assert needs["logits"] + needs["activations"] >= tile_bytes(16 * 64, 151_936, 2, on_gpu=True)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("tokens", [1, 64, 4096])
def test_no_number_of_micro_batches_up_to_the_usual_one_has_a_larger_loss(on_gpu: bool, tokens: int) -> None:
    runs = (max(tokens, tokens_of_run(tokens * count, 151_936, on_gpu=on_gpu)) for count in (1, 2, 16))
    sizes = [tile_bytes(run, 151_936, 2, on_gpu=on_gpu) for run in runs]
    assert step_bytes(tokens, 151_936, 2, on_gpu=on_gpu) == max(sizes)


def test_a_short_step_has_no_tile_of_more_tokens_than_it_has() -> None:
    (usual,) = (setting.default for setting in fields(TrainSettings) if setting.name == "accumulation")
    assert usual == MICRO_BATCHES
    assert step_bytes(8, 151_936, 2, on_gpu=True) == tile_bytes(128, 151_936, 2, on_gpu=True)
    assert step_bytes(8, 151_936, 2, on_gpu=False) < step_bytes(512, 151_936, 2, on_gpu=False)

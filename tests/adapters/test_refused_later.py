"""Refusals of later commands are reported before an adapter is trained, with ways that work."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from adapter_twins import adapted, checkpoint, stock
from peft import get_peft_model

from ktc.adapters.export import export
from ktc.cli.app import main
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.checkpoint.adapter_uses import AdapterFacts, refused_later
from ktc.model.loading.load import load
from ktc.training.tune.adapter_notes import adapter_notes
from ktc.training.tune.lora import lora_config
from ktc.training.tune.settings import TrainSettings
from ktc.training.tune.types import RunPaths

LATENT = ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
LAYERS = tuple(f"model.layers.{layer}.self_attn.{name}" for layer in range(9) for name in LATENT)
FACTS = AdapterFacts("deepseek_v3", LAYERS)
WAYS = "`ktc train --targets q_proj,kv_a_proj_with_mqa,o_proj` trains without"
"""By name: the facts, and words of the one finding's message and hint; no words, no finding."""
TOLD: dict[str, tuple[AdapterFacts, str, str]] = {
    "latent keys": (FACTS, "`kv_b_proj`: llama.cpp applies none", f"--gguf --merged` writes it merged; {WAYS}"),
    "latent keys of a GGUF file": (replace(FACTS, stored="a GGUF file"), "--gguf` will refuse", WAYS),
    "latent keys by their last name": (replace(FACTS, layers=LATENT), "`kv_b_proj`", WAYS),
    "latent keys beside experts": (
        replace(FACTS, layers=(*LAYERS, "model.layers.1.mlp.experts.down_proj")), "`kv_b_proj`", "writes it merged"
    ),
    "other layers": (replace(FACTS, layers=LATENT[:2]), "", ""),
    "a model without a GGUF form": (
        replace(FACTS, model_type="glm4_moe_lite"), "--gguf` will refuse the adapter: no GGUF architecture is known",
        "--layout per-expert`",
    ),
    "a layer that has no name in GGUF files": (
        AdapterFacts("qwen3_moe", ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.sieve"), num_layers=2),
        "`sieve`: files of `qwen3moe` have no name", "`ktc train --targets q_proj` trains without",
    ),
    "experts that checkpoints keep stacked": (
        AdapterFacts("gpt_oss", ("model.layers.0.mlp.experts.down_proj",), stacked=True, num_layers=2),
        "`ktc export ADAPTER` will refuse experts one by one", "--layout peft-fused`",
    ),
    "experts with dropout": (
        AdapterFacts("qwen3_moe", ("model.layers.0.mlp.experts.down_proj",), num_layers=2, dropout=True),
        "stock peft will refuse", "`ktc export ADAPTER` writes `lora_dropout` as 0",
    ),
    "modules that train": (AdapterFacts("qwen3_moe", (), ("model.embed_tokens",)), "`ktc export` will refuse", "merge"),
    "tied weights": (
        AdapterFacts("qwen3_moe", ("lm_head",), tied=frozenset({"lm_head.weight"})), "`lm_head`: the weight is tied", ""
    ),
    "a quantised original": (AdapterFacts("qwen3_moe", ("q_proj",), stored="quantised"), "rounded away", "beside"),
    "code of its own": (AdapterFacts("own", LAYERS, own_code=True), "code of its own", "`ktc serve`"),
}  # fmt: skip


@pytest.mark.parametrize("case", TOLD)
def test_each_refusal_is_told_once_with_the_ways_that_remain(case: str) -> None:
    facts, message, hint = TOLD[case]
    found = [each for each in refused_later(facts) if message and message in each.message]
    assert len(found) == bool(message)
    assert all(each.code == "A613" and hint in each.hint for each in found)
    assert len(refused_later(facts)) == (2 if case == "latent keys of a GGUF file" else bool(message))


def codes(found: tuple[Diagnostic, ...]) -> list[str]:
    return [each.code for each in found]


def test_the_start_of_a_run_tells_it_by_the_layers_that_peft_chose(compiled: Path) -> None:
    model = load(compiled, reference=True)
    for targets, told in (((), ["A613"]), (("q_proj", "o_proj"), []), (("q_proj", "kv_b_proj"), ["A613"])):
        adapter = get_peft_model(model, lora_config(compiled, TrainSettings(targets=targets)))
        assert codes(adapter_notes(RunPaths(compiled, Path("run")), adapter)) == told
        model = adapter.unload()


def test_the_command_that_is_offered_for_latent_keys_works_as_it_stands(tmp_path: Path) -> None:
    base = checkpoint("deepseek_v2", tmp_path)
    model = adapted(stock(base), target_modules=["kv_b_proj"], target_parameters=None)
    model.save_pretrained(str(tmp_path / "an adapter"))
    with pytest.raises(InputRefused) as refusal:
        export(tmp_path / "an adapter", "gguf", model=base)
    (found,) = refusal.value.diagnostics
    assert "`model.layers.0.self_attn.kv_b_proj` and " in found.message
    command = shlex.split(found.hint.split("`")[1])
    assert command[0] == "ktc"
    assert main([*command[1:], "-q"]) == 0
    assert list((tmp_path / "an adapter-gguf").glob("*.gguf"))


def test_the_layout_that_is_offered_for_a_model_without_gguf_files_works(tmp_path: Path) -> None:
    base = checkpoint("glm4_moe", tmp_path)
    model = adapted(stock(base), target_modules=["q_proj"], target_parameters=None)
    model.save_pretrained(str(tmp_path / "an adapter"))
    with pytest.raises(InputRefused, match="A606: no GGUF architecture is known for `glm4_moe`") as refusal:
        export(tmp_path / "an adapter", "gguf", model=base)
    command = shlex.split(refusal.value.diagnostics[0].hint.split("`")[1])
    assert main([*command[1:], "-q"]) == 0
    assert (tmp_path / "an adapter-per-expert").is_dir()

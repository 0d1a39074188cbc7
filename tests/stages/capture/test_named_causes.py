"""A hint that names a cause has looked it up: in `architectures`, in the files, in versions, in the trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedConfig
from transformers import __version__ as installed

from ktc.diagnostics import InputRefused
from ktc.model import twin
from ktc.model.checkpoint import open_index
from ktc.model.checkpoint.shards import absent_shards
from ktc.model.hf.named_class import not_a_causal_lm
from ktc.stages.capture.model import build_on_meta
from ktc.stages.capture.weights import map_weights


def hint_of(call: Any) -> str:
    with pytest.raises(InputRefused) as refusal:
        call()
    return refusal.value.diagnostics[0].hint


def small(**settings: Any) -> PreTrainedConfig:
    return twin.shrink(AutoConfig.for_model("qwen3_moe", **settings))


def hint_without(name: str, folder: Path, added: str = "") -> str:
    twin.build(small(), seed=0).save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    kept = tensors.pop(name)
    save_file({**tensors, **({added: kept} if added else {})}, file)
    return hint_of(lambda: map_weights(build_on_meta(small()), open_index(folder)))


def test_a_classifier_is_called_one(tmp_path: Path) -> None:
    AutoModelForSequenceClassification.from_config(small()).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    hint = hint_of(lambda: map_weights(build_on_meta(config), open_index(tmp_path)))
    assert hint.startswith("config.json names `Qwen3MoeForSequenceClassification`, a sequence classifier")


def test_absent_tensors_are_explained_by_the_files(tmp_path: Path) -> None:
    other = hint_without("model.norm.weight", tmp_path / "renamed", "model.final_norm.weight")
    assert other.startswith("the checkpoint has `model.final_norm.weight`, for which")
    whole = hint_without("model.norm.weight", tmp_path / "cut")
    assert whole.startswith("no shard is absent, so the checkpoint was saved without it")


def test_absent_shards_are_counted_by_the_names_of_the_others() -> None:
    assert absent_shards(["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"]) == (
        "model-00002-of-00003.safetensors",
    )
    assert absent_shards(["model.safetensors", "model-1-of-99999999999.safetensors"]) == ()


@pytest.mark.parametrize(
    ("kind", "named", "words"),
    [
        ("qwen3_moe", "Qwen3MoeForCausalLM", ""),
        ("qwen3_moe", "OurOwnForCausalLM", ""),
        ("qwen3_moe", "QwenLMHeadModel", ""),
        ("qwen3_moe", "GPT2DoubleHeadsModel", ""),
        ("qwen3_moe", "Qwen3MoeModel", "a model without a language-model head"),
        ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", ""),  # whole, with its towers
        ("switch_transformers", "SwitchTransformersForConditionalGeneration", "an encoder-decoder model"),
        ("gemma4", "Gemma4ForConditionalGeneration", ""),  # transformers' own causal LM of this config
    ],
)
def test_the_class_in_the_config_says_which_kind_of_model_it_is(kind: str, named: str, words: str) -> None:
    said = not_a_causal_lm(AutoConfig.for_model(kind, architectures=[named]))
    assert (words in said and said != "") if words else said == ""


def test_the_class_that_a_checkpoint_names_for_causal_models_is_one() -> None:
    own = AutoConfig.for_model("qwen3_moe", architectures=["OwnModel"])
    assert not_a_causal_lm(own)
    own.auto_map = {"AutoModelForCausalLM": "modeling_own.OwnModel"}
    assert not_a_causal_lm(own) == ""


def test_a_config_that_cannot_be_built_is_blamed_on_what_differs() -> None:
    encoder = AutoConfig.for_model("switch_transformers", architectures=["SwitchTransformersForConditionalGeneration"])
    assert "an encoder-decoder model" in hint_of(lambda: build_on_meta(encoder))
    broken = small()
    broken.transformers_version = "4.51.0"
    broken.rope_parameters = {"rope_type": "unheard of"}
    assert hint_of(lambda: build_on_meta(broken)) == (
        f"config.json was written by transformers 4.51.0, and {installed} is installed"
    )
    broken.transformers_version = installed
    hint = hint_of(lambda: build_on_meta(broken))
    assert hint.startswith("it is raised by `")
    assert ".py:" in hint
    assert torch.get_default_device() == torch.device("cpu")

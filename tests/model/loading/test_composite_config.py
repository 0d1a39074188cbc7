"""A text model within a larger config: a compiled one loads on every path and equals `AutoModelForCausalLM`."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

import ktc
from ktc.model.hf.stock_model import build_on_meta, part_of, vocabulary_of

TEXT = {
    "vocab_size": 300, "hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 256, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
    "num_position_embeddings": 16,
}  # fmt: skip
IDS = torch.tensor([[5, 6, 7, 99]])


def config(**more: Any) -> PreTrainedConfig:
    return AutoConfig.for_model("qwen3_5_moe", text_config=TEXT, vision_config=VISION, **more)


def test_the_part_of_a_config_is_the_one_that_transformers_takes() -> None:
    whole = config()
    stock = build_on_meta(whole, torch.float32)
    assert type(stock).__name__ == "Qwen3_5MoeForCausalLM"
    assert part_of(type(stock), whole) is stock.config is whole.text_config
    assert part_of(type(stock), whole.text_config) is whole.text_config  # as a caller of `from_pretrained` may give it
    again = build_on_meta(whole, torch.float32, type(stock))
    assert again.state_dict().keys() == stock.state_dict().keys()
    assert vocabulary_of(stock) == 300


def test_a_class_that_takes_the_whole_config_gets_it() -> None:
    whole = AutoConfig.for_model("gemma4", vision_config=None, audio_config=None)
    assert part_of(transformers.Gemma4ForConditionalGeneration, whole) is whole


@pytest.mark.slow
def test_a_compiled_checkpoint_with_images_loads_its_text_part_on_every_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, out = tmp_path / "model", tmp_path / "with_images"
    AutoModelForImageTextToText.from_config(config()).to(torch.bfloat16).save_pretrained(model)
    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = stock(input_ids=IDS).logits
    ktc.compile(model, "moe-lora", out, settings={"device": "cpu"}, text_only=True)
    exact = ktc.load(out, reference=True)
    assert type(exact.config) is type(stock.config)
    with torch.no_grad():
        assert torch.equal(exact(input_ids=IDS).logits, wanted)
        assert ktc.load(out, random_weights=3)(input_ids=IDS).logits.isfinite().all()
        by_kernel = ktc.load(out)(input_ids=IDS).logits
        found = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)(input_ids=IDS).logits
        assert torch.equal(found, by_kernel)
        monkeypatch.syspath_prepend(str(tmp_path))
        package = importlib.import_module("with_images")
        assert torch.equal(package.load()(input_ids=IDS).logits, by_kernel)
        ours = package.load()
        ours.refresh(shutil.copytree(model, tmp_path / "renewed"))
        assert torch.equal(ours(input_ids=IDS).logits, by_kernel)
    # the text model as an object: its config is a part of the folder's
    object_out = ktc.compile(AutoModelForCausalLM.from_pretrained(model), "moe-lora", tmp_path / "of_object")
    with torch.no_grad():
        assert torch.equal(ktc.load(object_out, reference=True)(input_ids=IDS).logits, wanted)

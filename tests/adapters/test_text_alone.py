"""Adapters of the text alone of a model with towers: merged, exported and checked with its checkpoint alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter

from ktc.adapters.adapter import read_adapter
from ktc.adapters.base_model import find_base
from ktc.adapters.export import export
from ktc.adapters.export_check import _twin, check
from ktc.adapters.merge import merge
from ktc.diagnostics import InputRefused
from ktc.model.twin import build, default_config, shrink

TEXT = "qwen3_5_moe_text"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "whole"
    model: Any = build(shrink(default_config("qwen3_5_moe", whole=True)), seed=0)
    model.save_pretrained(folder)
    return folder


def adapter_of(model: Any, folder: Path) -> Path:
    tuned: Any = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    tuned.save_pretrained(folder)
    return folder


def test_an_adapter_of_the_text_is_merged_and_exported_by_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    text: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    adapter = adapter_of(text, tmp_path / "adapter")
    base = find_base(read_adapter(adapter))
    assert type(base.model) is type(text.get_base_model() if isinstance(text, PeftModel) else text)
    merge(adapter, tmp_path / "merged")
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    stock: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tuned = PeftModel.from_pretrained(stock, adapter).eval()
    with torch.no_grad():
        given = {"input_ids": torch.arange(9)[None]}
        torch.testing.assert_close(merged(**given).logits, tuned(**given).logits, rtol=0, atol=1e-4)
    assert AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").config.vision_config is not None


def test_the_small_model_of_a_check_is_of_the_class_of_the_adapter(checkpoint: Path, tmp_path: Path) -> None:
    base = find_base(read_adapter(adapter_of(AutoModelForCausalLM.from_pretrained(checkpoint), tmp_path / "adapter")))
    assert type(_twin(base)) is type(base.model)
    assert _twin(base).state_dict().keys() == base.model.state_dict().keys()


@pytest.mark.slow
def test_an_export_of_such_an_adapter_is_read_by_stock_peft(checkpoint: Path, tmp_path: Path) -> None:
    adapter = adapter_of(AutoModelForCausalLM.from_pretrained(checkpoint), tmp_path / "adapter")
    exported = export(adapter, "peft-fused", tmp_path / "exported")
    found = check(adapter, exported)
    assert found.passed, found.found
    assert found.weights == exported.weights > 0


def test_an_adapter_of_the_whole_model_is_on_the_whole_model(checkpoint: Path, tmp_path: Path) -> None:
    whole: Any = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    adapter = adapter_of(whole, tmp_path / "adapter")
    assert type(find_base(read_adapter(adapter)).model) is type(whole)


def test_experts_of_a_whole_model_are_one_by_one_only_where_peft_stacks_them(checkpoint: Path, tmp_path: Path) -> None:
    """Peft has conversions for the text of Qwen3.5, and none for the model with towers."""
    for auto, refused in ((AutoModelForImageTextToText, True), (AutoModelForCausalLM, False)):
        model: Any = auto.from_pretrained(checkpoint, dtype=torch.float32)
        stacks = [name for name, _ in model.named_parameters() if name.endswith("experts.down_proj")]
        config = LoraConfig(r=2, target_parameters=stacks, init_lora_weights=False)
        folder = tmp_path / auto.__name__
        get_peft_model(model, config).save_pretrained(folder)
        if refused:
            with pytest.raises(InputRefused, match=r"A606.*`qwen3_5_moe` stacked"):
                export(folder, "per-expert", tmp_path / "one")
        else:
            if not any(isinstance(read, WeightConverter) for read in get_checkpoint_conversion_mapping(TEXT) or ()):
                pytest.skip("this transformers has no conversions of these experts")
            assert export(folder, "per-expert", tmp_path / "one").tensors > 0


def test_no_gguf_file_is_written_for_a_text_whose_architecture_is_unknown(tmp_path: Path) -> None:
    model: Any = build(shrink(default_config("qwen3_5_moe", whole=True)), seed=0)
    model.save_pretrained(tmp_path / "whole")
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "whole")
    with pytest.raises(InputRefused, match="A606"):
        export(adapter_of(whole, tmp_path / "adapter"), "gguf", tmp_path / "adapter.gguf")

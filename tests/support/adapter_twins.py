"""Stock models of small twins with adapters of random factors on them, as stock PEFT saves both."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ktc.model import twin

ATTENTION = ("q_proj", "o_proj")
EXPERTS = ("gate_up_proj", "down_proj")


def checkpoint(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint of the family's twin in several shards."""
    config = twin.default_config(family)
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 1
    model = twin.build(twin.shrink(config), seed=3, dtype=dtype)
    path = folder / f"{family}-{str(dtype).removeprefix('torch.')}"
    model.save_pretrained(path, max_shard_size="150KB")
    return path


def stock(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model: Any = AutoModelForCausalLM
    return cast("PreTrainedModel", model.from_pretrained(folder, dtype=dtype).eval())


def adapted(model: PreTrainedModel, attention: bool = True, **settings: Any) -> PeftModel:
    """The model with a LoRA on attention, on all stacks of experts, and on dense layers by their weights."""
    names = [name for name, _ in model.named_parameters()]
    dense = [n for n in names if n.endswith(".weight") and (".shared_expert" in n or ".mlp.down_proj" in n)]
    stacks = [name for name in names if name.endswith(EXPERTS)]
    modules = [n.removesuffix(".weight") for n in names if attention and n.removesuffix(".weight").endswith(ATTENTION)]
    given = {"r": 4, "lora_alpha": 12, "target_modules": modules, "target_parameters": stacks + dense, **settings}
    found = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **given))
    assert isinstance(found, PeftModel)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return found.eval()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return cast("Tensor", model(input_ids=torch.arange(3, 43).reshape(2, 20)).logits)

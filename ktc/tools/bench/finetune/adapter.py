"""The adapter of measured models: the same values at the start of each row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

Values = Mapping[str, Tensor]


def attach(model: PreTrainedModel, lora: LoraConfig, seed: int) -> PeftModel:
    """Return the model with a new adapter."""
    torch.manual_seed(seed)
    return cast("PeftModel", get_peft_model(model, lora))


def values(model: nn.Module) -> Values:
    """Return copies of the trained tensors by name, on the host."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in _trained(model).items()}


def assign(model: nn.Module, values: Values) -> None:
    """Set the trained tensors, all of which `values` has."""
    trained = _trained(model)
    assert trained.keys() == values.keys(), "the models have the same modules"
    with torch.no_grad():
        for name, tensor in trained.items():
            tensor.copy_(values[name])


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}

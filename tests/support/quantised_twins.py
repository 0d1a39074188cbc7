"""Twins whose checkpoints are quantised: FP8 codes with scales of their own, and configs of compressed-tensors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ktc.model import twin

Tensors = dict[str, Tensor]


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def fp8(
    rows: int, columns: int, block: tuple[int, int], stack: tuple[int, ...] = (), seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Codes that take every value, and scales."""
    codes = torch.arange(math.prod(stack) * rows * columns).mul(37).remainder(256).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 1  # NaN
    grid = (*stack, -(-rows // block[0]), -(-columns // block[1]))
    return codes.view(torch.float8_e4m3fn).reshape(*stack, rows, columns), random(*grid, seed=seed).abs() + 0.01


def by_element(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """The definition: one weight, one scale."""
    rows, columns = torch.arange(codes.shape[-2]) // block[0], torch.arange(codes.shape[-1]) // block[1]
    return codes.float() * scales.float()[..., rows[:, None], columns[None, :]]


def config_of(group: int, symmetric: bool = True, **changes: Any) -> dict[str, Any]:
    weights = {
        "num_bits": 4, "type": "int", "symmetric": symmetric, "group_size": None if group == -1 else group,
        "strategy": "channel" if group == -1 else "group", "actorder": None, **changes,
    }  # fmt: skip
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic", "fmt": "e4m3"}


def twin_of(family: str, folder: Path, **sizes: int) -> tuple[PreTrainedModel, Tensors]:
    """A small model on meta, and the tensors that transformers saves of its like."""
    small = twin.shrink(twin.default_config(family))
    vars(small).update(sizes)
    twin.build(small, seed=3, dtype=torch.bfloat16).save_pretrained(folder)
    with torch.device("meta"):
        model = cast("PreTrainedModel", AutoModelForCausalLM.from_config(small, dtype=torch.bfloat16))
    return model, load_file(folder / "model.safetensors")

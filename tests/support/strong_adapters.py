"""Adapters with a strong effect on a compiled model, as PEFT saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

import ktc


def save_strong_adapter(compiled: Path, config: LoraConfig, folder: Path, seed: int) -> Path:
    """Save an adapter of `compiled` whose factors are random, B too, and return its folder."""
    torch.manual_seed(seed)
    tuned: Any = get_peft_model(ktc.load(compiled, reference=True), config)
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    tuned.save_pretrained(folder)
    return folder

"""Checkpoints beside another one: the same names and shapes, with other values or a fault."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]


def other_values(tensors: Tensors) -> None:
    """Change every tensor of floats a little."""
    generator = torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator) * 0.02
            tensors[name] = (tensor.float() + noise).to(tensor.dtype)


def rewritten(checkpoint: Path, folder: Path, change: Callable[[Tensors], None] = other_values) -> Path:
    """Copy a checkpoint of safetensors with `change` applied to the tensors of each shard."""
    shutil.copytree(checkpoint, folder)
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = load_file(shard)
        change(tensors)
        save_file(tensors, shard, metadata={"format": "pt"})
    return folder

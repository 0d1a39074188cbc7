"""The stock model of a config with seeded weights, such that omitting part of a computation changes the result.

Input: a config, usually a shrunk one, and a seed. Output: the model in evaluation mode, every tensor random.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch
from torch import nn

from ktc.model.hf import stock_model
from ktc.model.twin.sizes import EXPERT_COUNTS, TOP_KS, is_size

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def build(
    config: PretrainedConfig, seed: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> PreTrainedModel:
    """Return the stock model of `config` in evaluation mode with every parameter and persistent buffer random.

    A value depends on `seed`, the tensor's name and its shape alone: not on the order of the modules or torch's global
    generator, which is unchanged. Matrices keep the scale of their input. Norms, biases and buffers (a router's
    correction bias) differ by 0.1 from their initial value, so that omitting one changes the result. A table that maps
    tokens to experts has different experts in every row.
    """
    with torch.random.fork_rng(devices=[]):
        # `torch.manual_seed` would seed the GPUs too, now or at their first use
        torch.default_generator.manual_seed(seed)
        model = stock_model.build(config, torch.float32)
    tensors: dict[str, torch.Tensor] = model.state_dict()
    with torch.no_grad():
        for name, tensor in tensors.items():
            generator = torch.Generator().manual_seed(seed * 0x1_0000_0001 + zlib.crc32(name.encode()))
            if tensor.is_floating_point():
                _randomise(tensor, generator)
            elif tensor.dim() == 2 and tensor.shape[1] in {getattr(config, top_k, None) for top_k in TOP_KS}:
                experts = next(count for count in EXPERT_COUNTS if is_size(getattr(config, count, None)))
                order = torch.rand(tensor.shape[0], getattr(config, experts), generator=generator).argsort(1)
                tensor.copy_(order[:, : tensor.shape[1]])
    model.eval()
    nn.Module.to(model, device=device, dtype=dtype)
    return model


def _randomise(tensor: torch.Tensor, generator: torch.Generator) -> None:
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
    if tensor.dim() < 2:
        tensor.add_(0.1 * noise)
    else:
        tensor.copy_(noise * tensor.shape[-1] ** -0.5)

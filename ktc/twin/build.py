"""The stock model of a config with seeded weights, in which leaving anything out of a computation shows.

In: a config, usually a shrunk one, and a seed. Out: the model in evaluation mode, every tensor random.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ktc.twin.sizes import EXPERT_COUNTS, TOP_KS, is_size

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def build(
    config: PretrainedConfig, seed: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> PreTrainedModel:
    """The stock model of `config` in evaluation mode with every parameter and persistent buffer random.

    A value depends on `seed`, the tensor's name and its shape alone: neither on the order of the modules nor on torch's
    global generator, which is left as it was. Matrices keep the scale of their input; norms, biases and buffers (a
    router's correction bias) move by 0.1 from their initial value, so that leaving one out of a computation shows.
    A table that says which experts a token goes to names different ones in every row.
    """
    with torch.random.fork_rng(devices=[]):
        # `torch.manual_seed` would seed the GPUs too, now or at their first use
        torch.default_generator.manual_seed(seed)
        model = cast("PreTrainedModel", AutoModelForCausalLM.from_config(config, dtype=torch.float32))
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

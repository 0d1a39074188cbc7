"""`Int8Layer`: keys and values of a growing cache as int8 codes with a scale for each position and head.

In: a `DynamicCache` that only the caller holds, and the kernels of its int8 layers. Out: the same cache, whose layers
keep codes (`Int8Tensor`). A call of few new tokens gets codes, for the kernel to read. One of many gets numbers: those
of its own tokens as they are, and the earlier ones decoded. Beams, crops and repeats of stock code
change codes. Refused (L454): keys and values that require gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.attention.decode import MOST_TOKENS, decoders
from ktc.model.attention.int8_decode import Int8DecodeAttention, quantised
from ktc.model.attention.int8_tensor import Int8Tensor, plain
from ktc.model.decode_steps.growing_cache import appended
from ktc.model.kernels.kernel_library import Kernel


def int8_kernels(model: nn.Module) -> dict[int, Kernel]:
    """Return the kernel of every layer whose attention reads int8 codes, by the layer's number."""
    return {
        int(module.layer_idx): decode.kernel
        for module, decode in decoders(model)
        if isinstance(decode, Int8DecodeAttention)
    }


def as_int8(cache: DynamicCache, kernels: Mapping[int, Kernel]) -> DynamicCache:
    """Change the empty layers of `cache` that have a kernel and hold every token."""
    layers = cast("list[Any]", cache.layers)
    for number, kernel in kernels.items():
        while cache.layer_class_to_replicate is DynamicLayer and len(layers) <= number:
            layers.append(DynamicLayer())
        if number < len(layers) and isinstance(layers[number], DynamicLayer) and not layers[number].is_sliding:
            layers[number] = Int8Layer(kernel)
    return cache


class Int8Layer(DynamicLayer):
    """`keys` and `values` are `Int8Tensor`s (B, heads, L, head_dim), views of memory with room for further tokens."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append numbers or codes (B, heads, T, head_dim), and return all keys and values."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            message = "a cache of int8 codes has no gradients"
            raise InputRefused(Diagnostic("L454", message, hint="generate under `torch.no_grad()`"))
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        earlier = self.get_seq_length()
        keys = self.keys = self._appended("keys", self.keys, key_states)
        values = self.values = self._appended("values", self.values, value_states)
        if key_states.shape[-2] <= MOST_TOKENS:
            return keys, values
        if not earlier:
            return key_states, value_states
        known_keys, known_values = plain(keys[..., :earlier, :]), plain(values[..., :earlier, :])
        return torch.cat([known_keys, key_states], -2), torch.cat([known_values, value_states], -2)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        if self.get_seq_length() > 0:
            self.batch_select_indices(torch.arange(cast("Tensor", self.keys).shape[0]).repeat_interleave(repeats))

    def _appended(self, name: str, present: Any, new: Tensor) -> Int8Tensor:
        added = new if isinstance(new, Int8Tensor) else quantised(self.kernel, new)
        if not isinstance(present, Int8Tensor):
            present = Int8Tensor.of(present.reshape(*new.shape[:-2], -1, new.shape[-1]))
        codes = appended(self, f"_room_of_{name}", present.codes, added.codes)
        scales = appended(self, f"_room_of_{name}_scales", present.scales, added.scales)
        return Int8Tensor(codes, scales, new.dtype)

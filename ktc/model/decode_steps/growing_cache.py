"""Keys and values in memory with room for further tokens, so that a decoding step copies one token and not all.

In: a `DynamicCache` that only the caller holds. Out: the same cache, whose full-attention layers append in place.
Values and shapes are those of `DynamicLayer`, which concatenates. A tensor that a caller changed (beams, crops,
repeats) is copied once into new memory. Under autograd and tracing layers concatenate as before.
"""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ktc.model.attention.key_index import carried, length_of
from ktc.model.experts.layouts.packed import zeros_on_huge_pages

_ROOM: Final = 64  # tokens: the steps between two copies, and at most this many unused rows

_KEYS, _VALUES = "_room_of_keys", "_room_of_values"  # attributes of a layer


def growing(cache: DynamicCache) -> DynamicCache:
    """Replace the layers of `cache` that hold every token; sliding and other layers stay as they are."""
    for number, layer in enumerate(cast("list[Any]", cache.layers)):
        if type(layer) is DynamicLayer:
            made = cast("list[Any]", cache.layers)[number] = GrowingLayer()
            vars(made).update(vars(layer))
    return cache


class GrowingLayer(DynamicLayer):
    """Keys and values (B, heads, L, head_dim) as views of memory that has room for up to 64 tokens more.

    An index of the keys, where attention made one, follows crops and changes of the batch.
    """

    appends = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Append (B, heads, T, head_dim), and return all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        needs_grad = key_states.requires_grad or value_states.requires_grad
        if (torch.is_grad_enabled() and needs_grad) or torch.compiler.is_compiling():
            return super().update(key_states, value_states, *args, **kwargs)
        self.keys = appended(self, _KEYS, cast("Tensor", self.keys), key_states)
        self.values = appended(self, _VALUES, cast("Tensor", self.values), value_states)
        return self.keys, self.values

    def release(self) -> None:
        """Release the memory, for keys and values that have moved elsewhere."""
        for name in (_KEYS, _VALUES):
            vars(self).pop(name, None)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Remove the last tokens."""
        with carried(self, lambda index: index.crop(length_of(self))):
            super().crop(*args, **kwargs)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the sequences of beams."""
        with carried(self, lambda index: index.choose_sequences(lambda t: t.index_select(0, beam_idx.to(t.device)))):
            super().reorder_cache(cast("torch.LongTensor", beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        with carried(self, lambda index: index.choose_sequences(lambda t: t.repeat_interleave(repeats, dim=0))):
            super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some sequences."""
        with carried(self, lambda index: index.choose_sequences(lambda t: t[indices, ...])):
            super().batch_select_indices(indices)


def appended(layer: DynamicLayer, name: str, present: Tensor, new: Tensor) -> Tensor:
    """Return `held` (..., L, d) with `new` (..., T, d) behind it, in memory that the layer keeps by this name."""
    length = present.shape[-2] if present.numel() else 0
    whole = length + new.shape[-2]
    room = cast("Tensor | None", vars(layer).get(name))
    if room is None or room.shape[-2] < whole or not _begins(room, present, new):
        room = zeros_on_huge_pages((*new.shape[:-2], -(-whole // _ROOM) * _ROOM, new.shape[-1]), new)
        if length:
            room[..., :length, :] = present
        setattr(layer, name, room)
    room[..., length:whole, :] = new
    return room[..., :whole, :]


def _begins(room: Tensor, present: Tensor, new: Tensor) -> bool:
    """Return whether `held` is the first rows of `room`, and `new` fits behind them."""
    sizes = (room.shape[:-2], room.shape[-1], room.dtype, room.device)
    if sizes != (new.shape[:-2], new.shape[-1], new.dtype, new.device) or present.shape[:-2] != room.shape[:-2]:
        return False
    return present.numel() > 0 and present.data_ptr() == room.data_ptr() and present.stride() == room.stride()

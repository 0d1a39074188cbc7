"""`KeyIndex`: codes of the keys of one cache layer, kept beside it and updated with it.

In: a cache layer of transformers, before and after a stock module updates it. Out: an index that covers the layer's
keys, or none. An index is valid for the tensors that it was made of, at their version. After any other change of the
layer it is built again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, StaticLayer

from ktc.model.attention.decode import KVCacheView
from ktc.model.attention.key_codes import Codes, encode, mean_of
from ktc.model.attention.sparsity import TOKENS, IndexFormat, block_bytes
from ktc.model.experts.private_api import version_of

_ROOM: Final = 64  # blocks: the steps between two copies of an index
_INDEX: Final = "ktc_key_index"  # the attribute of a cache layer
Version = tuple["weakref.ref[Tensor]", int]


@dataclass(slots=True)
class KeyIndex:
    """Codes of the first `covered` positions around a fixed `mean` (B, K, k), with room for more."""

    format: IndexFormat
    codes: Codes
    mean: Tensor
    covered: int = 0
    made_of: tuple[Version, ...] = ()

    @classmethod
    def of(cls, kv: KVCacheView, visible: Tensor, index: IndexFormat) -> KeyIndex:
        """Return an empty index of a cache, centred by the mean of its `visible` keys (B, L)."""
        B, K = kv.keys.shape[:2]
        mean = torch.cat([mean_of(tensor, visible) for tensor in _keys(kv)], -1).contiguous()
        blocks = kv.keys.new_zeros((B, K, 0, block_bytes(index, mean.shape[-1])), dtype=torch.uint8)
        return cls(index, Codes(blocks, kv.keys.new_zeros((B, K, 0), dtype=torch.float16)), mean)

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        return self.codes.blocks.nbytes + self.codes.scales.nbytes + self.mean.nbytes

    def reserve(self, positions: int) -> None:
        """Make room for the codes of `positions` positions."""
        blocks, scales = self.codes.blocks, self.codes.scales
        needed, capacity = -(-positions // TOKENS), blocks.shape[2]
        if needed <= capacity:
            return
        B, K, _, size = blocks.shape
        wider = Codes(
            blocks.new_zeros((B, K, needed + _ROOM, size)), scales.new_zeros((B, K, (needed + _ROOM) * TOKENS))
        )
        wider.blocks[:, :, :capacity] = blocks
        wider.scales[:, :, : capacity * TOKENS] = scales
        self.codes = wider

    def extend(self, kv: KVCacheView, positions: int) -> None:
        """Add the keys from `covered` up to `positions`, by the reference."""
        self.reserve(positions)
        first = self.covered // TOKENS * TOKENS
        joined = torch.cat([tensor[:, :, first:positions] for tensor in _keys(kv)], -1)
        codes = encode(joined, self.mean, self.format)
        end = first // TOKENS + codes.blocks.shape[2]
        self.codes.blocks[:, :, first // TOKENS : end] = codes.blocks
        self.codes.scales[:, :, first : end * TOKENS] = codes.scales
        self.covered = positions

    def crop(self, positions: int) -> None:
        """Forget the keys from `positions` on."""
        self.covered = min(self.covered, positions)

    def choose_sequences(self, chosen: Callable[[Tensor], Tensor]) -> None:
        """Change the first dimension as the cache layer changes that of its keys."""
        self.codes = Codes(chosen(self.codes.blocks).contiguous(), chosen(self.codes.scales).contiguous())
        self.mean = chosen(self.mean).contiguous()


def _keys(kv: KVCacheView) -> list[Tensor]:
    return [tensor for tensor in (kv.keys, kv.rope_keys) if tensor is not None]


def is_followed(layer: object) -> bool:
    """Return whether an index can follow a cache layer: one that keeps every token, and appends new ones."""
    appends = type(layer) in (DynamicLayer, StaticLayer) or getattr(layer, "appends", False)
    return appends and not any(t.is_inference() for t in _tensors(layer))


def index_of(layer: object) -> KeyIndex | None:
    """Return the index of a layer's present keys, None without one. It covers no key beyond the layer's."""
    index = cast("KeyIndex | None", vars(layer).get(_INDEX))
    if index is None or not _are_unchanged(index.made_of, _tensors(layer)):
        return None
    index.crop(length_of(layer))
    return index


def keep_index(layer: object, index: KeyIndex | None) -> None:
    """Make `index` that of the layer's present keys."""
    if index is not None:
        index.made_of = _versions(layer)
    setattr(layer, _INDEX, index)


@contextmanager
def carried(layer: object, change: Callable[[KeyIndex], None]) -> Generator[None]:
    """Apply `change` to the index of a layer whose keys the body changes."""
    index = index_of(layer) if _INDEX in vars(layer) else None
    yield
    if _INDEX in vars(layer):
        if index is not None:
            change(index)
        keep_index(layer, index)


def length_of(layer: object) -> int:
    """Return the number of positions that a cache layer holds."""
    return int(cast("Any", layer).get_seq_length())


def _tensors(layer: object) -> list[Tensor]:
    parts = (cast("Any", layer).keys, cast("Any", layer).values)
    return [part for part in parts if isinstance(part, Tensor)]


def _are_unchanged(made_of: tuple[Version, ...], present: list[Tensor]) -> bool:
    if len(made_of) != len(present) or any(tensor.is_inference() for tensor in present):
        return False
    return all(
        seen() is tensor and version == version_of(tensor)
        for (seen, version), tensor in zip(made_of, present, strict=True)
    )


def _versions(layer: object) -> tuple[Version, ...]:
    return tuple((weakref.ref(tensor), version_of(tensor)) for tensor in _tensors(layer))

"""`Decoder`: the forward passes of a model, and whether its sequences may share a cache.

In: a model, with or without adapters. Out: scores of the next token, (rows, V) in fp32. Sequences run together where
every layer of the cache holds keys and values by position; others run each with a cache of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ktc.inference.serving.generation import Generation
from ktc.inference.serving.native_rows import NativeRows
from ktc.inference.serving.request import Request
from ktc.inference.serving.row_cache import CachedRow, RowCache, cached_row
from ktc.model.attention.decode import DecodeAttention
from ktc.model.attention.paged_layers import paged_layers
from ktc.model.attention.paged_tensor import copies
from ktc.model.decode_steps.growing_cache import GrowingLayer
from ktc.model.decode_steps.int8_cache import Int8Layer

_JOINABLE: Final = (DynamicLayer, GrowingLayer, Int8Layer, DynamicSlidingWindowLayer)
_KINDS: Final = frozenset({"full_attention", "sliding_attention"})  # of `layer_types`
_BY_LENGTH: Final = frozenset({"dynamic", "longrope"})  # rotary frequencies that depend on the longest of a batch


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Bytes per token of every layer of a cache, with the tokens that the layer keeps (None: all)."""

    layers: tuple[tuple[int, int | None], ...]

    @property
    def has_windows(self) -> bool:
        """Whether a layer keeps the last tokens only."""
        return any(most is not None for _, most in self.layers)

    def of(self, tokens: int) -> int:
        """Return the bytes of a sequence."""
        return sum(nbytes * (tokens if most is None else min(tokens, most)) for nbytes, most in self.layers)

    def tokens(self, nbytes: int) -> int | None:
        """Return the longest sequence within a number of bytes, None where every length fits."""
        if self.of(1 << 40) <= nbytes:
            return None
        low, high = 0, 1 << 40
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.of(middle) <= nbytes else (low, middle)
        return low


class Decoder:
    """`alone` says why sequences cannot share a cache, "" where they can."""

    def __init__(self, model: Any) -> None:
        """Read one short prompt, which shows the cache."""
        self.model = model
        self._base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._arguments = frozenset(inspect.signature(self._base.forward).parameters)
        self.device = cast("torch.device", model.get_input_embeddings().weight.device)
        self.paged: Mapping[int, DecodeAttention] = paged_layers(self._base)
        """The layers whose attention reads pages, by their numbers."""
        asked = Request("probe", (0, 1), 1, model.generation_config)
        probe = Generation(asked, model)
        self.alone = self._reason(probe.cache)
        self.size = self._in_pages = self._in_bands = CacheSize(())
        if probe.cache is not None and not self.alone:
            self.scores(torch.tensor([asked.tokens], device=self.device), probe.cache, None, None)
            row = cached_row(probe.cache, 0, None, len(asked.tokens))
            self.paged = self._without_copies(row)
            numbers = range(len(row.layers))
            self.size, self._in_pages, self._in_bands = (
                _size(row, layers) for layers in (numbers, self.paged, set(numbers) - self.paged.keys())
            )

    def _without_copies(self, row: CachedRow) -> dict[int, DecodeAttention]:
        """Take a step in pages, and return the layers that read them where they are.

        Others have calls that their kernel does not compute, as those with soft caps, and would copy all pages in each.
        """
        rows = RowCache(self.paged)
        rows.join(row)
        rows.begin_step()
        position = torch.tensor([[row.length]], device=self.device)
        with copies() as found:
            self.scores(torch.zeros_like(position), rows.cache, None, position)
        copied = set(map(id, found))
        layers = {} if rows.pool is None else rows.pool.layers
        return {
            number: self.paged[number]
            for number, memories in layers.items()
            if not any(id(tensor) in copied for memory in memories for tensor in memory.tensors)
        }

    def scores(self, ids: Tensor, cache: Any, mask: Tensor | None, positions: Tensor | None) -> Tensor:
        """Read ids (rows, T) after a cache; return the scores of the token after each row, fp32.

        `mask` (rows, all positions) hides padding, `positions` (rows, T) count each row's tokens.
        """
        given: dict[str, Any] = {"attention_mask": mask, "past_key_values": cache, "use_cache": True}
        if positions is not None and "position_ids" in self._arguments:
            given["position_ids"] = positions
        if "logits_to_keep" in self._arguments:
            given["logits_to_keep"] = 1
        with torch.no_grad():
            return self._base(input_ids=ids, **given).logits[:, -1].float()

    def bytes_of(self, lengths: Sequence[int]) -> int:
        """Return the bytes of sequences of these lengths in one batch: in bands, all are as long as the longest."""
        return sum(map(self._in_pages.of, lengths)) + len(lengths) * self._in_bands.of(max(lengths))

    def native_rows(self) -> NativeRows | None:
        """Return what computes steps of a few rows natively, None for a model without native steps."""
        return NativeRows.of(self._base)

    def _reason(self, cache: DynamicCache | None) -> str:
        if not isinstance(cache, DynamicCache):
            return "its cache is not transformers' `DynamicCache`"
        if "position_ids" not in self._arguments or "attention_mask" not in self._arguments:
            return "its forward pass takes no positions or no padding mask"
        config = self._base.config.get_text_config()
        kinds = {type(layer).__name__ for layer in cast("list[Any]", cache.layers) if type(layer) not in _JOINABLE}
        kinds |= set(getattr(config, "layer_types", None) or ()) - _KINDS
        coded = (number for number, layer in enumerate(cache.layers) if isinstance(layer, Int8Layer))
        if set(coded) - self.paged.keys():
            return "its codes of keys and values are not on the CPU"
        if kinds:
            return f"its cache has layers of another kind ({', '.join(sorted(kinds))})"
        ropes = set(_rope_types(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)))
        if ropes & _BY_LENGTH:
            return "its rotary frequencies depend on the longest sequence of a batch"
        return ""


def choose(generations: list[Generation], scores: Tensor) -> list[int | Exception]:
    """Return the next token of every sequence from scores (rows, V), or the exception of its own processors."""
    likeliest = cast("list[int]", scores.argmax(-1).tolist())
    return [
        token if each.takes_the_likeliest else _chosen(each, scores[at : at + 1])
        for at, (each, token) in enumerate(zip(generations, likeliest, strict=True))
    ]


def _chosen(generation: Generation, scores: Tensor) -> int | Exception:
    try:
        return generation.choose(scores)
    except Exception as error:  # noqa: BLE001  # the other sequences of the batch continue
        return error


def _size(row: CachedRow, numbers: Collection[int]) -> CacheSize:
    layers = enumerate(zip(row.layers, row.windows, strict=True))
    return CacheSize(tuple(
        ((layer.keys.nbytes + layer.values.nbytes) // layer.keys.shape[1], None if window is None else window - 1)
        for number, (layer, window) in layers
        if layer is not None and number in numbers
    ))  # fmt: skip


def _rope_types(parameters: Any) -> Iterator[str]:
    if isinstance(parameters, Mapping):
        of = cast("Mapping[str, Any]", parameters)
        yield from (str(of[name]) for name in ("rope_type", "type") if name in of)
        for value in of.values():
            yield from _rope_types(value)

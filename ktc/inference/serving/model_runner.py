"""`ModelRunner`: the forward passes of a model, and whether its sequences may share a cache.

In: a model, with or without adapters. Out: logits of the next token, (rows, V) in fp32. Sequences run together where
every layer of the cache has keys and values by position; others run each with a cache of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ktc.inference.serving.cache_size import CacheSize, LayerSize
from ktc.inference.serving.generation import Generation
from ktc.inference.serving.graph_rows import GraphRows
from ktc.inference.serving.native_rows import NativeRows
from ktc.inference.serving.request import Request
from ktc.inference.serving.row_cache import CachedRow, RowCache, cached_row
from ktc.inference.serving.row_memory import memory_shape, unfit_row
from ktc.model.attention.decode import DecodeAttention, paged_layers
from ktc.model.attention.paged_tensor import copies
from ktc.model.attention.step_index import IndexedLayer
from ktc.model.decode_steps.growing_cache import GrowingLayer
from ktc.model.decode_steps.int8_cache import Int8Layer
from ktc.model.hf.stock_model import finds_positions

_JOINABLE: Final = (DynamicLayer, GrowingLayer, Int8Layer, DynamicSlidingWindowLayer)
_KINDS: Final = frozenset({"full_attention", "sliding_attention"})  # of `layer_types`
_BY_LENGTH: Final = frozenset({"dynamic", "longrope"})  # rotary frequencies that depend on the longest of a batch


class ModelRunner:
    """`unbatched_reason` says why sequences cannot share a cache, "" where they can."""

    def __init__(self, model: Any) -> None:
        """Prefill one short prompt, which shows the cache."""
        self.model = model
        self._base = _base_of(model)
        self._arguments = frozenset(inspect.signature(self._base.forward).parameters)
        self.device = cast("torch.device", model.get_input_embeddings().weight.device)
        self.paged: Mapping[int, DecodeAttention] = paged_layers(self._base)
        """The layers whose attention reads pages, by their numbers."""
        asked = _probe(model)
        cache = Generation(asked, model).cache
        self.unbatched_reason = _unbatched(self._base, self.paged, cache)
        self.size = CacheSize()
        self.example: CachedRow | None = None
        """A row of the kind that prompts become; None where sequences share no cache."""
        if cache is not None and not self.unbatched_reason:
            self.logits(torch.tensor([asked.tokens], device=self.device), cache, None, None)
            row = cached_row(cache, 0, None, len(asked.tokens))
            self.paged = self._without_copies(row)
            others = set(range(len(row.layers))) - self.paged.keys()
            graphs = None if unfit_row(row) else self.graph_rows()
            shape, indexed = (None, {}) if graphs is None else (memory_shape, graphs.indexed)
            self.size = CacheSize(_layer_sizes(row, self.paged, indexed), _layer_sizes(row, others, indexed), shape)
            self.example = row.clone()

    def _without_copies(self, row: CachedRow) -> dict[int, DecodeAttention]:
        """Take a step in pages, and return the layers that read them where they are.

        Others have calls that their kernel does not compute, as those with soft caps, and would copy all pages in each.
        """
        rows = RowCache(self.paged)
        rows.join(row)
        rows.begin_step()
        position = torch.tensor([[row.length]], device=self.device)
        with copies() as copied:
            self.logits(torch.zeros_like(position), rows.cache, None, position)
        ids = set(map(id, copied))
        layers = {} if rows.pool is None else rows.pool.layers
        return {
            number: self.paged[number]
            for number, memories in layers.items()
            if not any(id(tensor) in ids for memory in memories for tensor in memory.tensors)
        }

    def logits(self, ids: Tensor, cache: Any, mask: Tensor | None, positions: Tensor | None) -> Tensor:
        """Read ids (rows, T) after a cache; return the logits of the token after each row, fp32.

        `mask` (rows, all positions) hides padding, `positions` (rows, T) count each row's tokens.
        """
        given: dict[str, Any] = {"attention_mask": mask, "past_key_values": cache, "use_cache": True}
        if positions is not None and "position_ids" in self._arguments:
            given["position_ids"] = positions
        if "logits_to_keep" in self._arguments:
            given["logits_to_keep"] = 1
        with torch.no_grad():
            return self._base(input_ids=ids, **given).logits[:, -1].float()

    def native_rows(self) -> NativeRows | None:
        """Return what computes steps of a few rows natively, None for a model without native steps."""
        return NativeRows.of(self._base)

    def graph_rows(self) -> GraphRows | None:
        """Return what captures steps of a running batch, None for a model without CUDA graphs."""
        return GraphRows.of(self._base)

    @contextmanager
    def between_layers(self, call: Callable[[], None]) -> Generator[None]:
        """Call a function before each layer of the decoder that passes inside the block compute.

        The device has computed the layers before the last one then: what the function enqueues waits for one layer at
        most, not for all that the host has enqueued meanwhile.
        """
        ended = list[Callable[[], None]]()

        def before(*_: Any) -> None:
            ended.append(mark(self.device))
            if len(ended) > 1:
                ended.pop(0)()
            call()

        decoder = self._base.get_decoder() if hasattr(self._base, "get_decoder") else self._base
        stacks = [child for child in decoder.children() if isinstance(child, nn.ModuleList)]
        handles = [layer.register_forward_pre_hook(before) for layer in max(stacks, key=len, default=())]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def unbatched_reason(model: Any) -> str:
    """Return why sequences of a model, with or without adapters, cannot share a cache, "" where they can."""
    base = _base_of(model)
    return _unbatched(base, paged_layers(base), Generation(_probe(model), model).cache)


def _base_of(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _probe(model: Any) -> Request:
    return Request("probe", (0, 1), 1, model.generation_config)


def _unbatched(base: Any, paged: Collection[int], cache: DynamicCache | None) -> str:
    arguments = inspect.signature(base.forward).parameters
    if finds_positions(base):
        return "it reads images, and its own code keeps the positions behind them"
    if not isinstance(cache, DynamicCache):
        return "its cache is not transformers' `DynamicCache`"
    if "position_ids" not in arguments or "attention_mask" not in arguments:
        return "its forward pass takes no positions or no padding mask"
    config = base.config.get_text_config()
    kinds = {type(layer).__name__ for layer in cast("list[Any]", cache.layers) if type(layer) not in _JOINABLE}
    kinds |= set(getattr(config, "layer_types", None) or ()) - _KINDS
    coded = (number for number, layer in enumerate(cache.layers) if isinstance(layer, Int8Layer))
    if set(coded) - set(paged):
        return "its codes of keys and values are not on the CPU"
    if kinds:
        return f"its cache has layers of another kind ({', '.join(sorted(kinds))})"
    ropes = set(_rope_types(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)))
    if ropes & _BY_LENGTH:
        return "its rotary frequencies depend on the longest sequence of a batch"
    return ""


def mark(device: torch.device) -> Callable[[], None]:
    """Return a function that waits, asleep, until a device has computed what is enqueued on it now."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


def _layer_sizes(
    row: CachedRow, numbers: Collection[int], indexed: Mapping[int, IndexedLayer]
) -> tuple[LayerSize, ...]:  # fmt: skip
    """Return the sizes of some layers; those that are `indexed` have codes of their keys too."""
    sizes = list[LayerSize]()
    for number, (layer, window) in enumerate(zip(row.layers, row.windows, strict=True)):
        if layer is not None and number in numbers:
            per_position = (layer.keys.nbytes + layer.values.nbytes) // layer.keys.shape[1]
            if number in indexed:
                per_position += indexed[number].position_bytes(layer.keys, layer.values)
            sizes.append((per_position, None if window is None else window - 1))
    return tuple(sizes)


def _rope_types(parameters: Any) -> Iterator[str]:
    if isinstance(parameters, Mapping):
        of = cast("Mapping[str, Any]", parameters)
        yield from (str(of[name]) for name in ("rope_type", "type") if name in of)
        for value in of.values():
            yield from _rope_types(value)

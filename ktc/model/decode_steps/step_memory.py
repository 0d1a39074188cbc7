"""Keys and values at fixed addresses, for a decoding step that is captured once and replayed.

In: a `DynamicCache` of transformers, as `generate` fills it with a prompt. Out: the same content in `StepMemory`, of
which the `DynamicCache` is then a view, and a cache of `StepLayer`s, through which a model reads and appends at the
position that a tensor on the device holds. Layers with a window have all positions too: masks leave the others out.
Tensors of keys and values that outlive their cache stay as they are: while one lives, no other cache takes the memory.
Refused (`unfit`): layers that hold something else than keys and values of each position, and empty layers, such as
those that share keys and values with another layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Final, cast

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from ktc.model.attention.step_index import IndexedLayer, StepIndex
from ktc.model.decode_steps.growing_cache import GrowingLayer
from ktc.model.experts.layouts.packed import zeros_on_huge_pages
from ktc.model.kernels.triton_support import lacking

_WHOLE: Final = (DynamicLayer, GrowingLayer)
_SHORTEST: Final = 256  # positions
DOUBLED: Final = 4096  # beyond these positions, capacities grow by an eighth of the next power of two
Shape = tuple[int, ...]
_View = tuple[weakref.ref[Tensor], int]  # a tensor and the address of its first value


def unfit(cache: object) -> str:
    """Return why a cache cannot be held in a `StepMemory`, "" if it can."""
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        return f"the cache is a `{type(cache).__name__}`"
    empty = [number for number, layer in enumerate(_layers(cache)) if _is_empty(layer)]
    if len(empty) == len(_layers(cache)):
        return "the cache is empty"
    for number, layer in enumerate(_layers(cache)):
        if type(layer) not in (*_WHOLE, DynamicSlidingWindowLayer):
            return f"a layer of the cache is a `{type(layer).__name__}`"
        if number in empty:
            return f"layer {number} of the cache has no keys and values of its own"
        if getattr(layer, "record_past", False):
            return "the cache keeps positions that are outside of its window"
    return ""


def _is_empty(layer: Any) -> bool:
    keys: Tensor | None = getattr(layer, "keys", None)  # layers of another kind have none
    return keys is None or keys.numel() == 0


def _layers(cache: DynamicCache) -> list[Any]:
    return cast("list[Any]", cache.layers)


def length_of(cache: DynamicCache) -> int:
    """Return the number of positions of a cache, of which layers with a window may hold fewer."""
    return max(_length(layer) for layer in _layers(cache))


def batch_of(cache: DynamicCache) -> int:
    """Return the number of sequences of a cache."""
    return int(_layers(cache)[0].keys.shape[0])


def _length(layer: Any) -> int:
    windowed = type(layer) is DynamicSlidingWindowLayer
    return int(layer.cumulative_length if windowed else layer.keys.shape[-2])


def rounded(number: int, least: int = 1) -> int:
    """Return the power of two that is not smaller."""
    return max(least, 1 << (number - 1).bit_length())


class StepMemory:
    """Keys and values of `rows` sequences with room for `capacity` positions, of every layer.

    A step writes at `position` (1,) int64, and its model reads `cache`. Rows beyond a batch repeat its first.
    """

    def __init__(
        self, cache: DynamicCache, rows: int, capacity: int, indexed: Mapping[int, IndexedLayer] | None = None
    ) -> None:  # fmt: skip
        """Make it; layers that are `indexed` have codes of their keys too."""
        self.rows, self.capacity = rows, capacity
        self._indexed = {number: of for number, of in (indexed or {}).items() if of.budget < capacity}
        with torch.inference_mode(mode=False):  # a step within it may follow one outside
            self.held = tuple(
                (_empty(layer.keys, rows, capacity), _empty(layer.values, rows, capacity)) for layer in _layers(cache)
            )
            self.position = torch.zeros(1, dtype=torch.int64, device=self.held[0][0].device)
            self._indices = {number: of.index(*self.held[number]) for number, of in self._indexed.items()}
        self._has_codes = False  # of the keys of the cache that was taken
        self.shapes = shapes_of(cache)
        self.cache = Cache(layers=[
            StepLayer(
                *pair, self.position, is_sliding=type(layer) is DynamicSlidingWindowLayer,
                index=self._indices.get(number),
            )
            for number, (layer, pair) in enumerate(zip(_layers(cache), self.held, strict=True))
        ])  # fmt: skip
        self._user: weakref.ref[DynamicCache] | None = None
        self._shown: tuple[weakref.ref[torch.UntypedStorage], ...] = ()  # alive while a view of the last `take` is
        self._views: tuple[_View, ...] = ()  # keys and values of each layer since the last `show`

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(tensor.nbytes for pair in self.held for tensor in pair) + sum(
            index.nbytes for index in self._indices.values()
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The position, and the keys and values of all layers."""
        of_indices = (tensor for index in self._indices.values() for tensor in index.tensors)
        return self.position, *(tensor for pair in self.held for tensor in pair), *of_indices

    def is_used_by(self, cache: DynamicCache) -> bool:
        """Return whether `take` made `cache` a view of this memory."""
        return self._user is not None and self._user() is cache

    def is_idle(self, cache: DynamicCache) -> bool:
        """Return whether no other cache is a view of this memory."""
        return self._user is None or self._user() in (None, cache)

    def is_free(self, cache: DynamicCache) -> bool:
        """Return whether `cache` may be copied into this memory: no other cache and no tensor is a view of it."""
        return self.is_idle(cache) and all(storage() is None for storage in self._shown)

    def leave(self, cache: DynamicCache) -> None:
        """Let other caches use the memory that `cache` was a view of."""
        if self.is_used_by(cache):
            self._user = None

    def serves(self, cache: DynamicCache, rows: int, capacity: int) -> bool:
        """Return whether the memory has these sizes, and keys and values like those of `cache`."""
        return (self.rows, self.capacity) == (rows, capacity) and self.shapes == shapes_of(cache)

    def holds(self, cache: DynamicCache) -> bool:
        """Return whether `cache` is a view of this memory, with room for another position."""
        layers, length = _layers(cache), length_of(cache)
        if len(layers) != len(self.held) or length >= self.capacity:
            return False
        kept_views = [kept for layer in layers for kept in (layer.keys, layer.values)]
        if len(self._views) == len(kept_views) and all(map(_is_same, self._views, kept_views)):
            return all(_length(layer) == length for layer in layers)
        return all(
            _is_view(kept, memory, length) and _length(layer) == length
            for layer, pair in zip(layers, self.held, strict=True)
            for kept, memory in zip((layer.keys, layer.values), pair, strict=True)
        )

    def take(self, cache: DynamicCache) -> None:
        """Copy the content of `cache`, and make it a view of this memory."""
        length, shown = length_of(cache), list[weakref.ref[torch.UntypedStorage]]()
        for layer, pair in zip(_layers(cache), self.held, strict=True):
            for kept, memory in zip((layer.keys, layer.values), pair, strict=True):
                batch, first = kept.shape[0], length - kept.shape[-2]
                source = kept.clone() if _shares_storage(kept, memory) else kept
                memory.zero_()  # masked values are still multiplied, by 0: an old NaN would stay one
                memory[:batch, :, first:length] = source
                memory[batch:, :, first:length] = source[:1]
            keys, values = map(_alias, pair)
            shown += [weakref.ref(tensor.untyped_storage()) for tensor in (keys, values)]
            layer.keys, layer.values = keys[: layer.keys.shape[0]], values[: layer.values.shape[0]]
            if type(layer) is GrowingLayer:
                layer.release()
        self._has_codes = False
        self._shown = tuple(shown)
        self._user = weakref.ref(cache)
        self.show(cache, length)

    def encode(self, present: Tensor, length: int) -> None:
        """Write the codes of the first `length` positions, if they are missing. `present` (rows, L) hides padding."""
        if self._has_codes or not self._indices:
            return
        firsts = cast("list[int]", present[:, :length].argmax(1).tolist())
        for number, index in self._indices.items():
            for row, first in enumerate(firsts):
                self._indexed[number].encode(index, *self.held[number], row, slice(first, length))
        self._has_codes = True

    def show(self, cache: DynamicCache, length: int) -> None:
        """Make `cache`, a view of this memory, one of the first `length` positions, as it would hold them."""
        views = list[_View]()
        for layer, pair in zip(_layers(cache), self.held, strict=True):
            first = 0
            if type(layer) is DynamicSlidingWindowLayer:
                layer.cumulative_length = length
                first = max(0, length - layer.sliding_window + 1)
            layer.keys, layer.values = (
                _positions(cast("Tensor", kept), memory, first, length)
                for kept, memory in zip((layer.keys, layer.values), pair, strict=True)
            )
            views += [(weakref.ref(kept), kept.data_ptr()) for kept in (layer.keys, layer.values)]
        self._views = tuple(views)


def shapes_of(cache: DynamicCache) -> tuple[tuple[Shape, Shape, torch.dtype, torch.device], ...]:
    """Return the properties of each layer that caches of one memory share."""
    layers = [(cast("Tensor", layer.keys), cast("Tensor", layer.values)) for layer in _layers(cache)]
    return tuple((_sizes(keys), _sizes(values), keys.dtype, keys.device) for keys, values in layers)


def _sizes(kept: Tensor) -> Shape:
    return kept.shape[1], kept.shape[3]


def capacity_for(positions: int) -> int:
    """Return the capacity of a memory for this many positions: few sizes, since each needs a capture.

    A power of two up to 4096. Beyond it at most 1.25 times the positions, since long contexts take most of the memory.
    """
    whole = rounded(positions, _SHORTEST)
    step = whole if whole <= DOUBLED else whole // 8
    return -(-positions // step) * step


def _empty(kept: Tensor, rows: int, capacity: int) -> Tensor:
    # zeros: masked values are still multiplied, by 0
    return zeros_on_huge_pages((rows, kept.shape[1], capacity, kept.shape[3]), kept)


def _alias(memory: Tensor) -> Tensor:
    """Return a tensor at the same address with a storage of its own, which lives as long as a view of it."""
    with torch.inference_mode(mode=False):
        return torch.from_dlpack(memory)


def _positions(kept: Tensor, memory: Tensor, first: int, end: int) -> Tensor:
    """Return some positions of the rows of which `kept` is a view."""
    (_, heads, _, width), strides = memory.shape, memory.stride()
    return kept.as_strided((kept.shape[0], heads, end - first, width), strides, first * strides[2])


def _is_same(view: _View, kept: Tensor) -> bool:
    """Return whether `kept` is a tensor that `show` made, with its memory, so that its strides need no comparison."""
    return view[0]() is kept and view[1] == kept.data_ptr()


def _is_view(kept: Tensor, memory: Tensor, length: int) -> bool:
    """Return whether `kept` is the last of the first `length` positions of a memory, from its first row on."""
    if kept.shape[0] > memory.shape[0] or kept.stride() != memory.stride():
        return False
    first = length - kept.shape[-2]
    return kept.data_ptr() == memory.data_ptr() + first * memory.stride(2) * memory.itemsize


def _shares_storage(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


class StepLayer(StaticLayer):
    """Keys and values of all positions, (rows, heads, capacity, d), to which a step appends at `position`."""

    index: StepIndex | None
    """The codes of the keys, of a layer whose attention is sparse."""

    def __init__(
        self, keys: Tensor, values: Tensor, position: Tensor, *, is_sliding: bool, index: StepIndex | None = None
    ) -> None:  # fmt: skip
        super().__init__(keys.shape[2])
        self.index = index
        self.keys, self.values, self.position = keys, values, position
        self.is_sliding, self.is_initialized = is_sliding, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values (rows, heads, 1, d) at the position, and return those of all positions."""
        keys, values = cast("Tensor", self.keys), cast("Tensor", self.values)
        if writes_at_once(keys, values, key_states, value_states):
            from ktc.model.decode_steps import cache_kernels

            cache_kernels.write(keys, values, self.position, key_states.detach(), value_states.detach())
        else:
            keys.index_copy_(2, self.position, key_states)
            values.index_copy_(2, self.position, value_states)
        return keys, values

    def get_seq_length(self, *args: Any) -> Any:
        """Return the position as a tensor, so that a model's computations with it are part of the captured step."""
        return self.position[0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of positions, and the first of them."""
        return self.max_cache_len, 0


def writes_at_once(*tensors: Tensor, device: str = "cuda") -> bool:
    """Return whether one kernel writes keys and values: plain tensors of one dtype on a GPU, in rows of one piece."""
    first = tensors[0]
    if first.device.type != device or lacking(first.device):
        return False
    return all(
        type(one) is Tensor and one.dtype == first.dtype and one.device == first.device and one.stride(-1) == 1
        for one in tensors
    )

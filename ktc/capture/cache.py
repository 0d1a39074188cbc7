"""What generation caches: the stock model's own cache, measured on meta tensors -> bytes per layer and token.

Measured and not computed from the config, so that latent, grouped, sliding and recurrent caches are all as large as the
installed transformers makes them. A model whose cached forward does not run on meta tensors has no measure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ktc.capture.types import CacheLayer

_LENGTHS = (8, 16)  # two points of a line: its slope is per token, its intercept per sequence


def measure_cache(model: PreTrainedModel) -> tuple[CacheLayer, ...] | None:
    """What each layer of `model` (on meta, with its markers in place) caches of one sequence; None if it cannot say."""
    try:
        short, long = (_cached(model, length) for length in _LENGTHS)
    except Exception:  # noqa: BLE001 - foreign code; without the measure the plan says that it has none
        return None
    layers: list[CacheLayer] = []
    for before, after in zip(short, long, strict=True):
        window = getattr(after, "sliding_window", None)
        window = window if isinstance(window, int) and window > 0 else None
        grown = _bytes(after) - _bytes(before)
        if window is not None and window <= _LENGTHS[1]:
            per_token, fixed = 0, _bytes(after)  # the window is full already
        else:
            per_token = grown // (_LENGTHS[1] - _LENGTHS[0])
            fixed = _bytes(after) - per_token * _LENGTHS[1]
        layers.append(CacheLayer(per_token, fixed, window))
    return tuple(layers)


def _cached(model: PreTrainedModel, length: int) -> list[Any]:
    """The layers of the cache after one sequence of `length` tokens."""
    cache = DynamicCache(config=model.config)
    tokens = torch.zeros(1, length, dtype=torch.long, device="meta")
    with torch.no_grad():
        model(input_ids=tokens, past_key_values=cache, use_cache=True)
    return list(cast("Any", cache).layers)


def _bytes(layer: object) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(list(vars(layer).values())))


def _tensors(values: list[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            if value.ndim > 1:  # states; counters are scalars
                yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(list(cast("list[Any]", value)))
        elif isinstance(value, dict):
            yield from _tensors(list(cast("dict[Any, Any]", value).values()))

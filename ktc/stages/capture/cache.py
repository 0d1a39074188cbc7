"""The size of the generation cache: run the stock model's own cache on meta tensors -> bytes per layer and token.

The size is measured, not computed from the config: latent, grouped, sliding and recurrent caches have the sizes that
the installed transformers gives them. A model whose cached forward does not run on meta tensors has no measurement.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ktc.stages.capture.types import CacheLayer

_LENGTHS = (8, 16)  # two points of a line: the slope is per token, the intercept per sequence


def measure_cache(model: PreTrainedModel) -> tuple[CacheLayer, ...] | None:
    """Return the cache size of each layer of `model` for one sequence, or None if it cannot be measured.

    `model` is on meta, with its markers installed.
    """
    try:
        short, long = (_cached(model, length) for length in _LENGTHS)
    except Exception:  # noqa: BLE001 - foreign code; without a measurement the plan says so
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
    """Return the cache's layers after one sequence of `length` tokens."""
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

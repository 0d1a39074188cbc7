"""An image for a twin: random pixels as its towers take them, and the placeholders of the text that they fill.

Input: a model that reads images, and tokens of text. Output: the arguments of a call. The form of pixels is read from
the arguments of the model's own code, and the number of placeholders is that of the features which it makes of them.
Refused (ValueError): a model whose code takes pixels in none of the known forms.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

_PATCHES = 4  # along each side of an image, before patches are merged
_CHANNELS = 3
_SMALL_IMAGE = 56  # pixels along each side, where the config names no size
_PLACEHOLDERS = ("image_token_id", "image_token_index")
_FRAMES = ("temporal_patch_size", "patch_temporal")
_MERGES = ("spatial_merge_size", "merge_size", "merge_kernel_size", "pooling_kernel_size")


def with_image(model: PreTrainedModel, tokens_BT: Tensor, seed: int) -> dict[str, Tensor]:
    """Return the arguments of a call with an image in the middle of the first sequence of `tokens_BT` (B, T) int64.

    Raises ValueError for a model whose pixels or placeholder are unknown.
    """
    placeholder = _placeholder(model)
    pixels, count = _fitting(model, seed)
    text = tokens_BT[0].clone()
    text[text == placeholder] = 0
    half = len(text) // 2
    ids = torch.cat([text[:half], torch.full((count,), placeholder), text[half:]])[None]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **pixels}
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        given["mm_token_type_ids"] = (ids == placeholder).int()
    return given


def _placeholder(model: PreTrainedModel) -> int:
    named = (getattr(model.config, name, None) for name in _PLACEHOLDERS)
    placeholder = next((number for number in named if isinstance(number, int)), None)
    if placeholder is None:
        raise ValueError("its config names no token that stands for an image")
    return placeholder


def _fitting(model: PreTrainedModel, seed: int) -> tuple[dict[str, Tensor], int]:
    """Return the first form of pixels that the model's towers take, and the number of rows that they make of it."""
    reasons: list[str] = []
    for shapes in _forms(model):
        generator = torch.Generator().manual_seed(seed)
        pixels = torch.randn(shapes.pop("pixel_values"), generator=generator).to(model.dtype)
        given = {"pixel_values": pixels, **{name: torch.tensor(value) for name, value in shapes.items()}}
        try:
            with torch.no_grad():
                features = _reader(model)(**given)
        except Exception as error:  # noqa: BLE001 - foreign code raises anything on pixels of another form
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        pooled = getattr(features, "pooler_output", None)
        return given, _rows(pooled if pooled is not None else getattr(features, "last_hidden_state", features))
    raise ValueError(f"its towers take none of the known forms of pixels: {'; '.join(dict.fromkeys(reasons))}")


def _reader(model: PreTrainedModel) -> Callable[..., Any]:
    """Return what makes features of pixels, of the model or of the one inside its head."""
    reads = next((part for part in (model, model.base_model) if hasattr(part, "get_image_features")), None)
    if reads is None:
        raise ValueError("its code has no `get_image_features`")
    return cast("Any", reads).get_image_features


def _rows(features: Any) -> int:
    if isinstance(features, Tensor):
        return features.shape[:-1].numel()
    return sum(_rows(part) for part in features)


def _forms(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """Yield forms of one image by the names of arguments: the shape of `pixel_values`, the values of the others."""
    vision = cast("Any", model.config).vision_config
    taken = inspect.signature(_reader(model)).parameters
    patch = _side(getattr(vision, "patch_size", None), 14)
    merge = next((_side(getattr(vision, name), 1) for name in _MERGES if getattr(vision, name, None)), 1)
    side = _PATCHES * merge if merge < _PATCHES else 2 * merge
    patches, area = side * side, patch * patch
    if "image_grid_thw" in taken:
        grid: Mapping[str, Any] = {"image_grid_thw": [[1, side, side]]}
        frames = next((_side(getattr(vision, name), 1) for name in _FRAMES if getattr(vision, name, None)), 1)
        of_merged = (patches, merge * patch, merge * patch, _CHANNELS)
        for shape in ((patches, _CHANNELS * frames * area), (patches, _CHANNELS, patch, patch), of_merged):
            yield {"pixel_values": shape, **grid}
    elif "image_position_ids" in taken:
        places = [[[x, y] for y in range(side) for x in range(side)]]
        yield {"pixel_values": (1, patches, _CHANNELS * area), "image_position_ids": places}
    else:
        sizes = [side * patch, _side(getattr(vision, "image_size", None), _SMALL_IMAGE)]
        sizes += [math.isqrt(number) * patch for number in _numbers_of_patches(model.config)]
        for pixels in dict.fromkeys(sizes):
            named = {"image_sizes": [[pixels, pixels]]} if "image_sizes" in taken else {}
            yield {"pixel_values": (1, _CHANNELS, pixels, pixels), **named}


def _numbers_of_patches(config: PretrainedConfig) -> Iterator[int]:
    """Yield the numbers of patches for which a config has another setting each, such as the features made of them."""
    for name, value in vars(config).items():
        if "patch" in name and isinstance(value, dict):
            yield from (number for number in cast("dict[Any, Any]", value) if isinstance(number, int))


def _side(value: Any, default: int) -> int:
    """Return a size that configs write as a number or as a pair."""
    first: Any = cast("list[Any]", value)[0] if isinstance(value, list | tuple) else value
    return first if isinstance(first, int) and first > 0 else default

"""The memory of a pass through a tower for images, by the sizes of its config: a captured model -> `TowerPass`.

A tower is frozen, and no gradient passes through it: what is live at the widest point of one layer counts, not the
number of layers. Images are the largest that the checkpoint's processor makes, one in each sequence. docs/design.md,
"Memory", has the formula and its measured error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from ktc.foundation.decode import read_json
from ktc.foundation.regular_files import PathRefused, read_regular
from ktc.model.hf.private_api import attention_of
from ktc.stages.capture import CapturedModel

_PROCESSORS: Final = ("processor_config.json", "preprocessor_config.json")
_ASSUMED_PIXELS: Final = 1 << 20  # of the largest image, where nothing names another
_MOST_PIXELS: Final = 1 << 28  # no processor allows more in earnest
_LONGEST_SIDE: Final = 1 << 13  # a larger "edge" is an area, as processors of Qwen write it
_SIDES: Final = ("max_image_size", "image_size")
_MERGES: Final = ("spatial_merge_size", "merge_kernel_size", "pooling_kernel_size", "merge_size")
_ROTATED: Final = 8  # vectors in fp32: queries and keys, turned by their positions


@dataclass(frozen=True, slots=True)
class TowerPass:
    """A pass over the patches of images in the tower `fqn`.

    `patches` are those of the largest image, `merged` make one token. `per_patch` are bytes, and `per_pair` those of
    two patches of an image, where attention keeps its scores.
    """

    fqn: str
    patches: int
    merged: int
    per_patch: int
    per_pair: int = 0

    def bytes(self, batch: int, length: int) -> int:
        """Return the bytes of a pass with an image in each of `batch` sequences, no longer than the sequence."""
        patches = min(self.patches, length * self.merged)
        return batch * patches * (self.per_patch + self.per_pair * patches)


def tower_pass(captured: CapturedModel) -> TowerPass | None:
    """Return the pass of the model's tower for images; `None` for a model of text, and for sizes that are unknown."""
    vision: Any = getattr(captured.source.config, "vision_config", None)
    if vision is None or not captured.towers:
        return None
    width, inner = _size(vision, "hidden_size", "embed_dim"), _size(vision, "intermediate_size")
    heads, side = _size(vision, "num_heads", "num_attention_heads"), _size(vision, "patch_size")
    if not (width and heads and side):
        return None
    parts = {fqn: captured.model.get_submodule(fqn) for fqn in captured.towers}
    fqn = max(parts, key=lambda name: sum(parameter.numel() for parameter in parts[name].parameters()))
    names = [type(module).__name__ for module in parts[fqn].modules()]
    item, merged = captured.model.dtype.itemsize, max(1, _size(vision, *_MERGES)) ** 2
    pixels = 3 * max(1, _size(vision, "temporal_patch_size")) * side * side * (4 + item)
    turned = 4 * _ROTATED * width if any("rotary" in name.lower() for name in names) else 0
    attention, mlp = 6 * width * item + turned, 3 * (width + (inner or 4 * width)) * item
    levels = getattr(vision, "deepstack_visual_indexes", None) or ()
    features = int(captured.facts["hidden"]) * item * (1 + len(levels)) // merged
    kept = heads * (item + 8) if attention_of(vision) == "eager" else 0
    patches = _most_patches(captured.source.folder, vision, side, merged)
    return TowerPass(fqn, patches, merged, pixels + max(attention, mlp) + features, kept)


def tower_note(captured: CapturedModel) -> str:
    """Return what a plan says of the passes of a model's towers, "" for a model of text."""
    if not captured.towers:
        return ""
    one = tower_pass(captured)
    if one is None:
        return "the memory of passes through towers is not counted: their sizes are unknown"
    return (
        f"a pass of `{one.fqn}` is estimated for one image in each sequence, of at most {one.patches:,} patches "
        f"({one.patches // one.merged:,} tokens): {one.per_patch / 1024:.0f} KiB for a patch"
    )


def _most_patches(folder: Path | None, vision: Any, side: int, merged: int) -> int:
    """Return the patches of the largest image that the processor makes, and of all tiles that it cuts it into."""
    settings: Mapping[str, Any] = next(_settings(folder), dict[str, Any]())
    if tokens := _number(settings.get("max_soft_tokens")):
        return tokens * merged
    if patches := _number(settings.get("in_patch_limit")):
        return patches
    tiles = _number(settings.get("max_patches"))
    area = min(_MOST_PIXELS, _area(settings) or _square(vision) or _ASSUMED_PIXELS)
    return (1 + tiles if tiles else 1) * math.ceil(area / side**2)


def _area(settings: Mapping[str, Any]) -> int:
    """Return the pixels of the largest image by the settings of a processor, 0 where they have none."""
    given: Any = settings.get("size")
    size = cast("Mapping[str, Any]", given) if isinstance(given, dict) else dict[str, Any]()
    if pixels := _number(settings.get("max_pixels")):
        return pixels
    if longest := _number(size.get("longest_edge")):
        return longest if longest > _LONGEST_SIDE else longest**2
    if sides := _number(size.get("height")) * _number(size.get("width")):
        return sides
    return _number(settings.get("max_image_size")) ** 2


def _square(vision: Any) -> int:
    return _size(vision, *_SIDES) ** 2


def _settings(folder: Path | None) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of the image processor, by the files of a checkpoint; those that are not read are left out."""
    for name in _PROCESSORS if folder is not None else ():
        try:
            read: Any = read_json(read_regular(cast("Path", folder) / name))
        except (OSError, PathRefused, ValueError):
            continue
        if isinstance(read, dict):
            values = cast("Mapping[str, Any]", read)
            inner: Any = values.get("image_processor", values.get("media_proc_cfg"))
            if isinstance(inner, dict):
                yield cast("Mapping[str, Any]", inner)
            elif name == _PROCESSORS[-1]:
                yield values


def _size(config: Any, *names: str) -> int:
    """Return the first of a config's sizes that it has, the larger side of a pair; 0 for none."""
    for name in names:
        value: Any = getattr(config, name, None)
        numbers: list[Any] = [*cast("list[Any]", value)] if isinstance(value, list | tuple) and value else [value]
        if all(_number(number) for number in numbers):
            return max(map(_number, numbers))
    return 0


def _number(value: object) -> int:
    return value if type(value) is int and 0 < value <= _MOST_PIXELS else 0

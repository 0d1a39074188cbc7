"""Images before the tokens of a comparison: the inputs that the checkpoint's processor makes of them.

In: OUT, images, and sequences of tokens. Out: the arguments of a call. Refused: a model that reads text alone (G731), a
processor that cannot be read (G732), images that its template does not place (G733).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.hf.processor import RejectedMessages, image_inputs
from ktc.model.loading.images import open_processor

_OF_TEXT: Final = ("input_ids", "attention_mask")
_KINDS: Final = "token_type_ids"  # the end of the names of tensors with a number for each token
_PARTS: Final = ("image", "video", "vision", "audio")


@dataclass(frozen=True, slots=True)
class Shown:
    """A question that shows images: its tokens (1, P) int64, and the processor's tensors by the names of arguments.

    `marks` are tokens that stand for images, video or sound, and `words` names the images.
    """

    ids: Tensor
    pixels: Mapping[str, Tensor]
    marks: tuple[int, ...]
    words: str

    @property
    def length(self) -> int:
        """The number of tokens."""
        return self.ids.shape[1]

    def before(self, ids_NT: Tensor) -> Tensor:
        """Return the sequences (N, P + T) that begin with the question. Their tokens that are marks become others."""
        plain = next(token for token in range(len(self.marks) + 1) if token not in self.marks)
        text = ids_NT.masked_fill(torch.isin(ids_NT, torch.tensor(self.marks)), plain)
        return torch.cat([self.ids.expand(len(text), -1), text], dim=1)


def show(out: Path, files: Sequence[Path], images: Sequence[Any], config: PreTrainedConfig, trusted: bool) -> Shown:
    """Return the question about `images`, which were read from `files`. Raises InputRefused (G731 to G733)."""
    processor = open_processor(out, trusted=trusted)
    parts = [{"type": "image", "image": image} for image in images]
    try:
        made = image_inputs(processor, [{"role": "user", "content": parts}])
    except RejectedMessages as error:
        message = f"the processor does not take a turn of images: {error}"
        raise InputRefused(Diagnostic("G733", message, hint="leave `--image` out")) from error
    pixels = {name: value for name, value in made.items() if name not in _OF_TEXT and isinstance(value, Tensor)}
    names = ", ".join(f"`{file.name}`" for file in files)
    return Shown(made["input_ids"], pixels, _marks(config), names)


def _marks(config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the tokens that a config names for images, video and sound."""
    named = vars(config).items()
    marks = (
        value
        for name, value in named
        if name.endswith(("_token_id", "_token_index")) and any(part in name for part in _PARTS)
    )
    return tuple(sorted({mark for mark in marks if isinstance(mark, int)}))


def arguments(ids_NT: Tensor, shown: Shown | None, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return the arguments of a call of sequences (N, T) int64, each of which begins with the question `shown`.

    Pixels are of `dtype`, or as the processor makes them, on the device of the sequences.
    """
    given = {"input_ids": ids_NT, "attention_mask": torch.ones_like(ids_NT)}
    if shown is None:
        return given
    count, length = ids_NT.shape
    for name, value in shown.pixels.items():
        value = pad(value, (0, length - value.shape[1])) if name.endswith(_KINDS) else value
        kind = dtype if value.is_floating_point() else None
        given[name] = torch.cat([value] * count).to(ids_NT.device, kind)
    return given

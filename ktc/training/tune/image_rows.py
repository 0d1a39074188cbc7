"""Rows with images: their tokens with placeholders, and the pixels of a micro-batch.

In: the checkpoint's processor, texts of rows, and their images: files beside the data file, or data URIs. Out: tokens
with labels, none at what the processor inserts; micro-batches of TRL's collator with tensors of images beside them.
Refused (T549): a model that reads text alone, images that are not read, texts that the processor rejects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.images import ImageLimits, ImageRefused, read_data_uri, read_image
from ktc.model.hf.processor import RejectedMessages, may_read_images, placeholder_id, raw_inputs, read_processor
from ktc.model.manifest.manifest import read_manifest
from ktc.training.tune.labels import NOT_LEARNED, Labelled

TEXT: Final = "image_text"
FILES: Final = "image_files"
_OF_TEXT: Final = ("input_ids", "attention_mask")


class RejectedRow(Exception):
    """A row whose images are not read; `hint` is what helps."""

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class RowImages:
    """The text of a row with a placeholder for every image, and its images."""

    text: str = ""
    files: tuple[str, ...] = ()


def open_processor(out: Path, trusted: bool) -> Any:
    """Return the processor of a compiled model that reads images. Raises InputRefused (T549)."""
    record = read_manifest(out).model
    if not may_read_images(out, record.class_name, record.own_code):
        message = f"the data has images, and `{out.name}` reads text alone: its class is `{record.class_name}`"
        raise InputRefused(Diagnostic("T549", message, hint="take a model with towers, or rows without images"))
    return read_processor(out, "T549", trusted=trusted)


def located(image: str, data_file: str) -> str:
    """Return a data URI as it is, and a path relative to the folder of the data file."""
    return image if image[:5].lower() == "data:" else str(Path(data_file).parent / image)


def with_placeholders(processor: Any, images: RowImages, row: Labelled, *, everything: bool = False) -> Labelled:
    """Return a row's tokens as the processor writes them, with its labels. Raises RejectedRow.

    With `everything` the labels are those of prompts too.
    """
    made = _made(processor, images)
    ids = cast("list[int]", made["input_ids"][0].tolist())
    labels, at = [NOT_LEARNED] * len(ids), len(row.ids)
    for place in reversed(range(len(ids))):  # the text after the last image ends both
        if at and ids[place] == row.ids[at - 1]:
            at -= 1
            labels[place] = row.labels[at]
    if at:
        raise RejectedRow("the processor writes another text than the chat template")
    of_images = _of_images(processor, made, ids)
    if of_images is None and everything:
        message = "its processor does not say which tokens are those of images, and the prompt is learned"
        raise RejectedRow(message, "learn the answers alone")
    labels = [NOT_LEARNED if of else label for of, label in zip(of_images or [False] * len(ids), labels, strict=True)]
    return Labelled(ids, labels, row.joined)


def _of_images(processor: Any, made: Mapping[str, Any], ids: Sequence[int]) -> list[bool] | None:
    """Return which tokens stand for images: by their kinds, or where a processor makes none, by its placeholder."""
    if (kinds := made.get("mm_token_type_ids")) is not None:
        return [bool(kind) for kind in kinds[0].tolist()]
    number = placeholder_id(processor)
    return None if number is None else [token == number for token in ids]


def _made(processor: Any, images: RowImages) -> dict[str, Any]:
    """Return the processor's inputs of a row. Raises RejectedRow."""
    read: list[Any] = []
    for image in images.files:
        try:
            is_data = image[:5].lower() == "data:"
            read.append(read_data_uri(image, ImageLimits()) if is_data else read_image(Path(image), ImageLimits()))
        except ImageRefused as refused:
            shown = "the image" if image[:5].lower() == "data:" else f"the image `{image}`"
            raise RejectedRow(f"{shown} is refused: {refused}", refused.hint) from refused
    try:
        return raw_inputs(processor, images.text, read, special_tokens=False)
    except RejectedMessages as error:
        raise RejectedRow(f"the processor does not take the row: {error}") from error


class ImageCollator:
    """Micro-batches of texts and images: those of TRL's `collator`, with the tensors of the processor."""

    with_images = True  # such micro-batches are not stacked

    def __init__(self, collator: Any, processor: Any) -> None:
        self._collator, self._processor = collator, processor

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the inputs of a micro-batch: token kinds (rows, T), and images of all rows one after the other."""
        batch = dict(self._collator([{name: row[name] for name in ("input_ids", "labels")} for row in examples]))
        made = [self._inputs(row) if row.get(FILES) else {} for row in examples]
        length = batch["input_ids"].shape[1]
        for name in dict.fromkeys(name for inputs in made for name in inputs if name not in _OF_TEXT):
            values = [inputs.get(name) for inputs in made]
            if name.endswith("token_type_ids"):
                batch[name] = torch.stack([_kinds(value, length) for value in values])
            else:
                batch[name] = torch.cat([value for value in values if value is not None])
        return batch

    def _inputs(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the processor's inputs of a row. Raises InputRefused (T549) for images that changed meanwhile."""
        hint = "leave the files as they are until the run has ended, and continue it with `--resume auto`"
        try:
            made = _made(self._processor, RowImages(row[TEXT], tuple(row[FILES])))
        except RejectedRow as error:
            message = f"a row that was read before the training began is not read again: {error}"
            raise InputRefused(Diagnostic("T549", message, hint=hint)) from error
        if made["input_ids"].shape[1] != len(row["input_ids"]):
            message = f"images of a row changed their sizes during the training: {', '.join(row[FILES])[:200]}"
            raise InputRefused(Diagnostic("T549", message, hint=hint))
        return made


def _kinds(value: Tensor | None, length: int) -> Tensor:
    """Return the kinds of a row's tokens, (length,), 0 where it has none."""
    row = torch.zeros(0, dtype=torch.long) if value is None else value[0]
    return pad(row, (0, length - len(row)))

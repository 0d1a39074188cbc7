"""Images in a prompt: the inputs that the checkpoint's own processor makes of them.

In: files of images and a text. Out: a `Prompt` with pixels. Refused: a model that reads text alone (G731), a processor
that cannot be read (G732), an image that cannot be read or placed (G733).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktc.diagnostics import Diagnostic, InputRefused, Span
from ktc.foundation.images import ImageLimits, ImageRefused, read_image
from ktc.inference.generate.prompts import Prompt
from ktc.model.hf.processor import (
    RejectedMessages,
    image_inputs,
    may_read_images,
    raw_inputs,
    read_processor,
)

if TYPE_CHECKING:
    from PIL.Image import Image

_OF_TEXT = ("input_ids", "attention_mask")


def read_images(files: Sequence[Path], limits: ImageLimits | None = None) -> tuple[Image, ...]:
    """Return the images of files as RGB. Raises InputRefused (G733) with all faults, and HostLacks (H230)."""
    images, faults = list[Any](), list[Diagnostic]()
    for file in files:
        try:
            images.append(read_image(file, limits or ImageLimits()))
        except ImageRefused as refused:
            message = f"the image `{file}` is refused: {refused}"
            faults.append(Diagnostic("G733", message, Span(str(file), 1, 1, 1, 1), hint=refused.hint))
    if faults:
        raise InputRefused(*faults)
    return tuple(images)


def open_processor(out: Path, *, trusted: bool = False) -> Any:
    """Return the processor of the compiled model in `out`. Raises InputRefused (G731, G732, and of the manifest)."""
    from ktc.model.manifest.manifest import read_manifest

    record = read_manifest(out).model
    if not may_read_images(out, record.class_name, record.own_code):
        left_out = " since it was compiled with `--text-only`" if record.left_out_bytes else ""
        message = f"`{out.name}` reads text alone{left_out}: its class is `{record.class_name}`"
        hint = "compile it without `--text-only`" if left_out else "leave the images out, or use a model with towers"
        raise InputRefused(Diagnostic("G731", message, hint=hint))
    return read_processor(out, "G732", trusted=trusted)


def render_with_images(
    processor: Any, text: str, images: Sequence[Image], *, system: str = "", raw: bool = False
) -> Prompt:
    """Return the tokens and pixels of a question about images, which precede its text.

    With `raw` the text has the processor's placeholders itself. Raises InputRefused (G733).
    """
    parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts}]
    if system:
        messages.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
    try:
        made = raw_inputs(processor, text, images) if raw else image_inputs(processor, messages)
    except RejectedMessages as error:
        message = f"the processor does not take the prompt: {error}"
        hint = "with `--raw` the prompt has a placeholder for each image" if raw else ""
        raise InputRefused(Diagnostic("G733", message, hint=hint)) from error
    return prompt_of(made, text)


def prompt_of(made: Mapping[str, Any], text: str) -> Prompt:
    """Return the prompt of a processor's inputs of one text."""
    pixels = {name: value for name, value in made.items() if name not in _OF_TEXT}
    return Prompt(text, tuple(made["input_ids"][0].tolist()), special=False, pixels=pixels)

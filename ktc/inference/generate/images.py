"""Images in a prompt: the inputs that the checkpoint's own processor makes of them.

In: the processor, images and a text. Out: a `Prompt` with pixels. Refused: images that cannot be placed (G733).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.inference.generate.prompts import Prompt
from ktc.model.hf.processor import RejectedMessages, image_inputs, raw_inputs

if TYPE_CHECKING:
    from PIL.Image import Image

_OF_TEXT = ("input_ids", "attention_mask")


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

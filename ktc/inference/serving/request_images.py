"""The images of a request: parts of its messages with data URIs, decoded within limits.

In: a checked body with the data URIs that were kept beside it, and the checkpoint's processor. Out: a `ReadImages` in
place of the tokenizer, whose inputs have the pixels. Refused (400): a model that reads text alone, images of other
turns than the user's, more images than allowed, addresses of a network, and images that are not read. Nothing is
fetched.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch
from torch import Tensor
from transformers import BatchEncoding

from ktc.foundation.images import ImageLimits, ImageRefused, read_data_uri
from ktc.inference.serving.body_images import BodyImages, address_of, image_parts
from ktc.inference.serving.refusals import RequestRefused
from ktc.inference.serving.request import PixelKey
from ktc.model.hf.processor import RejectedMessages, image_inputs

_LOW_DETAIL: Final = (512, 512)  # pixels, as OpenAI's API has it
_POSITIVE: Final = (1 << 63) - 1
_OF_TEXT: Final = ("input_ids", "attention_mask")


@dataclass(frozen=True, slots=True)
class ImageAllowance:
    """The images that one request may have, and the limits of each; `pixel_bytes` bounds those of all requests."""

    count: int = 8
    limits: ImageLimits = field(default_factory=lambda: ImageLimits(num_bytes=10 << 20))
    pixel_bytes: int = 4 << 30

    @property
    def body_bytes(self) -> int:
        """The bytes that images may add to a body."""
        return self.count * self.limits.uri_length


class ReadImages:
    """Stands for the tokenizer of a request with images: its inputs are those of the processor."""

    def __init__(self, tokenizer: Any, inputs: Mapping[str, Any], placeholder: int | None) -> None:
        """Take the processor's inputs; `placeholder` is the token of an image, `None` for an unknown one."""
        self.tokenizer = tokenizer
        self._text = {name: inputs[name] for name in _OF_TEXT if name in inputs}
        self.pixels = {name: value for name, value in inputs.items() if name not in _OF_TEXT}
        self.key = pixel_key(self._text["input_ids"], self.pixels, placeholder)

    def apply_chat_template(self, conversation: Any, *, tokenize: bool = True, **options: Any) -> Any:
        """Return the inputs, or the text of a conversation without its images."""
        if tokenize:
            return BatchEncoding(self._text)
        return self.tokenizer.apply_chat_template(conversation, tokenize=False, **options)

    def decode(self, *given: Any, **named: Any) -> Any:
        """Return the text of tokens."""
        return self.tokenizer.decode(*given, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def require_readable(body: Mapping[str, Any], processor: Any, allowed: ImageAllowance) -> bool:
    """Return whether a body has images. Raises RequestRefused (400) where it may have none, or fewer."""
    count = 0
    for where, turn, _ in _images(body):
        if processor is None:
            raise RequestRefused(400, f"`{where}`: the model reads text alone", "unsupported_value", where)
        if turn.get("role", "user") != "user":
            message = f"`{where}`: an image is in a turn of the user"
            raise RequestRefused(400, message, "invalid_value", where)
        count += 1
        if count > allowed.count:
            message = f"`{where}`: a request has at most {allowed.count} images"
            raise RequestRefused(400, message, "too_many_images", where)
    return count > 0


def read_images(
    body: Mapping[str, Any], apart: BodyImages, allowed: ImageAllowance, made: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return messages as processors take them, with decoded images; `made` are the handler's, with addresses.

    Data URIs may be kept `apart` under the addresses. Raises RequestRefused (400) for an image that is not read.
    """
    images = list[Any]()
    for where, _, part in _images(body):
        try:
            image = read_data_uri(apart.address(address_of(part) or ""), allowed.limits)
        except ImageRefused as refused:
            words = f"`{where}`: the image is refused: {refused}" + (f" ({refused.hint})" if refused.hint else "")
            raise RequestRefused(400, words, "invalid_image", where) from refused
        if _detail(part) == "low":
            image.thumbnail(_LOW_DETAIL)
        images.append(image)
    rest = iter(images)
    for turn in made:
        turn["content"] = [
            {"type": "image", "image": next(rest)} if part["type"] == "image" else part for part in turn["content"]
        ]
    return made


def inputs_of(processor: Any, messages: Sequence[Any], tools: Any, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the processor's inputs of messages with images. Raises RequestRefused (400) for what it rejects."""
    try:
        return image_inputs(processor, messages, tools=tools, variables=variables)
    except RejectedMessages as error:
        message = f"the model's processor does not take these messages: {error}"
        raise RequestRefused(400, message, "invalid_image", "messages") from error


def pixel_key(ids: Tensor, pixels: Mapping[str, Any], placeholder: int | None) -> PixelKey | None:
    """Return the key of a prompt's images from its tokens (1, T); `None` where the images' tokens are unknown.

    Tensors of one number for each token belong to the text and are not in the digest, for a longer text about the same
    images has others.
    """
    kinds = pixels.get("mm_token_type_ids")
    of_images = ids == placeholder if kinds is None else kinds != 0
    places = cast("list[int]", cast("Tensor", of_images)[0].nonzero()[:, 0].tolist())
    digest = hashlib.sha256()
    for name in sorted(pixels):
        if not (isinstance(pixels[name], Tensor) and pixels[name].shape == ids.shape) and not _digest(
            digest, name, pixels[name]
        ):
            return None
    if not places:
        return None
    words = struct.unpack("<4q", digest.digest())
    return PixelKey(places[0], places[-1], tuple(-1 - (word & _POSITIVE) for word in words))


def _digest(digest: Any, name: str, value: Any) -> bool:
    """Add a value to a digest; return whether its kind is known."""
    if isinstance(value, list | tuple):
        digest.update(f"{name} of {len(cast('list[Any]', value))}".encode())
        return all(_digest(digest, name, part) for part in cast("list[Any]", value))
    if isinstance(value, Tensor):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(cast("Any", value.contiguous().reshape(-1).view(torch.uint8).numpy()))
        return True
    digest.update(f"{name} {value!r}".encode())
    return value is None or isinstance(value, bool | int | float | str)


def _images(body: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Yield the place, the turn and the part of each image."""
    for where, part, turn in image_parts(body):
        if "tool_calls" not in turn:  # whose content is not read
            yield where, turn, part


def _detail(part: Mapping[str, Any]) -> Any:
    given: Any = part["image_url"]
    return cast("Mapping[str, Any]", given).get("detail") if isinstance(given, dict) else part.get("detail")

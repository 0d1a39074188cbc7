"""The images of a request: parts of its messages with data URIs, decoded within limits.

In: a checked body with the data URIs that were kept beside it, and the checkpoint's processor. Out: a `ReadImages` in
place of the tokenizer, whose inputs have the pixels. Refused (400): a model that reads text alone, images of other
turns than the user's, more images than allowed, addresses of a network, and images that are not read. Nothing is
fetched.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch
from torch import Tensor
from transformers import BatchEncoding

from ktc.foundation.images import ImageLimits, ImageRefused, read_data_uri
from ktc.inference.serving.body_images import PARTS, BodyImages, address_of, image_parts
from ktc.inference.serving.refusals import RequestRefused
from ktc.inference.serving.request import PixelKey
from ktc.model.hf.processor import RejectedMessages, image_inputs

_LOW_DETAIL: Final = (512, 512)  # pixels, as OpenAI's API has it
_WORDS: Final = 4  # of 8 bytes in a digest
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


@dataclass(frozen=True, slots=True)
class GivenImage:
    """A part with an image that the handler reads: its place in the body, and the role of its turn."""

    where: str
    role: str
    part: Mapping[str, Any]


def images_of(body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> tuple[GivenImage, ...]:
    """Return the images of `messages`, which the handler makes of a body, in its order.

    The body may have more: fields that the handler does not read, and turns with calls, whose content it leaves out.
    """
    places = {id(part): where for where, part, _ in image_parts(body)}
    fallback = "messages" if "messages" in body else "input"
    images = list[GivenImage]()
    for turn in messages:
        content: Any = () if "tool_calls" in turn else turn.get("content")
        for part in cast("list[Any]", content) if isinstance(content, list) else ():
            if isinstance(part, dict) and cast("dict[str, Any]", part).get("type") in PARTS:
                role, where = str(turn.get("role", "user")), places.get(id(cast("Any", part)), fallback)
                images.append(GivenImage(where, role, cast("dict[str, Any]", part)))
    return tuple(images)


def require_readable(images: Sequence[GivenImage], processor: Any, allowed: ImageAllowance) -> None:
    """Raise RequestRefused (400) for images where a request may have none, or fewer."""
    for count, image in enumerate(images, 1):
        where = image.where
        if processor is None:
            raise RequestRefused(400, f"`{where}`: the model reads text alone", "unsupported_value", where)
        if image.role != "user":
            message = f"`{where}`: an image is in a turn of the user"
            raise RequestRefused(400, message, "invalid_value", where)
        if count > allowed.count:
            message = f"`{where}`: a request has at most {allowed.count} images"
            raise RequestRefused(400, message, "too_many_images", where)


def read_images(
    given: Sequence[GivenImage], apart: BodyImages, allowed: ImageAllowance, made: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return messages as processors take them, with decoded images; `made` are the handler's, with addresses.

    Data URIs may be kept `apart` under the addresses. Raises RequestRefused (400) for an image that is not read.
    """
    images = list[Any]()
    for one in given:
        where, part = one.where, one.part
        try:
            image = read_data_uri(apart.address(address_of(part) or ""), allowed.limits)
        except ImageRefused as refused:
            words = f"`{where}`: the image is refused: {refused}" + (f" ({refused.hint})" if refused.hint else "")
            raise RequestRefused(400, words, "invalid_image", where) from refused
        if _detail(part) == "low":
            image.thumbnail(_LOW_DETAIL)
        images.append(image)
    places = [
        (turn["content"], at) for turn in made for at, part in enumerate(turn["content"]) if part["type"] == "image"
    ]
    for (content, at), image in zip(places, images, strict=True):
        content[at] = {"type": "image", "image": image}
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
    if kinds is None and placeholder is None:
        return None
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
    # The key stands in the place of these tokens. After an image of fewer tokens, they may be those of text.
    replaced = cast("list[int]", ids[0, places[0] : min(places[0] + _WORDS, places[-1] + 1)].tolist())
    digest.update(repr(replaced).encode())
    words = struct.unpack(f"<{_WORDS}q", digest.digest())
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


def _detail(part: Mapping[str, Any]) -> Any:
    given: Any = part["image_url"]
    return cast("Mapping[str, Any]", given).get("detail") if isinstance(given, dict) else part.get("detail")

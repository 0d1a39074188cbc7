"""Images of a body, kept beside its JSON until they are decoded: a large body is parsed as quickly as its text.

In: the bytes of a body. Out: its JSON, in which a short name stands for each data URI of an image, and `BodyImages`
with the URIs by these names. Refused: text that is larger than a body without images (413), or is not JSON (400).
A name has a random part, so no client can write the name of another's image.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, cast

from ktc.inference.serving.refusals import RequestRefused

FIELDS: Final = ("messages", "input")
PARTS: Final = ("image_url", "input_image")
"""The types of parts with an image, of the two APIs."""
_MARK: Final = b'"data:image'
_SHORTEST: Final = 1 << 10  # bytes of a URI that is kept apart
_COLON: Final = re.compile(rb"[ \t\r\n]*:")
_OF_NO_URI: Final = re.compile(rb"[^!-~]|\\")  # what JSON's parser has to see: escapes, control characters, other bytes


@dataclass(frozen=True, slots=True)
class BodyImages:
    """Data URIs by their names in the body; `on_drop` is called when they are needed no more."""

    texts: dict[str, str] = field(default_factory=dict[str, str], repr=False)
    on_drop: Callable[[], None] = lambda: None

    def address(self, given: str) -> str:
        """Return the data URI of a name, and any other address as it is."""
        return self.texts.get(given, given)

    def drop(self) -> None:
        """Release the URIs."""
        if self.texts:
            self.texts.clear()
            self.on_drop()


BODY_IMAGES: Final = ContextVar[BodyImages]("body_images")
"""Those of the request that a task answers."""


def opened(
    body: bytes | bytearray, most: int, parse: Callable[[bytes | bytearray], dict[str, Any]], apart: bool = True
) -> tuple[bytes, dict[str, str]]:
    """Return the JSON of a body with names of images, of at most `most` bytes, and their URIs by these names.

    `parse` returns the object of JSON text. With `apart` False no image is kept apart. Raises RequestRefused (413), and
    what `parse` raises.
    """
    texts = dict[str, str]()
    value = parse(b"".join(_pieces(memoryview(body), body, texts, most)) if apart else body)
    kept = {name for _, part, _ in image_parts(value) if (name := address_of(part)) in texts}
    if others := texts.keys() - kept:
        value = cast("dict[str, Any]", _restored(value, {name: texts.pop(name) for name in others}))
    rest = json.dumps(value, ensure_ascii=False).encode()
    if others and len(rest) > most:
        raise too_large(most)
    return rest, texts


def too_large(most: int) -> RequestRefused:
    """Return the refusal of a body that has more than `most` bytes besides images."""
    return RequestRefused(413, f"a body has at most {most} bytes")


def image_parts(body: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield the place and the object of each part with an image, and its turn. The body need not be checked."""
    for name in FIELDS:
        for at, item in _objects(body.get(name)):
            if item.get("type") in PARTS:
                yield f"{name}[{at}]", item, item
            for number, part in _objects(item.get("content")):
                if part.get("type") in PARTS:
                    yield f"{name}[{at}].content[{number}]", part, item


def address_of(part: Mapping[str, Any]) -> str | None:
    """Return the address of a part's image, `None` where it has none."""
    given: Any = part.get("image_url")
    address: Any = cast("dict[str, Any]", given).get("url") if isinstance(given, dict) else given
    return address if isinstance(address, str) else None


def _objects(value: object) -> Iterator[tuple[int, dict[str, Any]]]:
    for at, item in enumerate(cast("list[object]", value) if isinstance(value, list) else ()):
        if isinstance(item, dict):
            yield at, cast("dict[str, Any]", item)


def _pieces(view: memoryview, body: bytes | bytearray, texts: dict[str, str], most: int) -> Iterator[memoryview]:
    """Yield the JSON of a body with names. Raises RequestRefused (413) where it has more than `most` bytes."""
    secret, begin, at, length = secrets.token_hex(16), 0, 0, 0
    while (at := body.find(_MARK, at)) >= 0:
        start, end = at + 1, body.find(b'"', at + 1)
        if end < 0:
            break
        at = end
        if body[start - 2 : start - 1] == b"\\" or end - start < _SHORTEST or _is_key(body, end):
            continue
        uri = bytes(view[start:end]).replace(b"\\/", b"/")  # as some encoders write it
        if _OF_NO_URI.search(uri):
            continue
        name = f"data:image/{secret}-{len(texts)}"
        texts[name] = uri.decode("latin-1")
        for piece in (view[begin:start], memoryview(name.encode())):
            length += len(piece)
            yield piece
        begin, at = end, end + 1
    if length + len(body) - begin > most:
        raise too_large(most)
    yield view[begin:]


def _is_key(body: bytes | bytearray, end: int) -> bool:
    """Return whether the text that ends at `end` is the name of a field."""
    return _COLON.match(body, end + 1) is not None


def _restored(value: Any, texts: Mapping[str, str]) -> Any:
    """Return a JSON value with texts in place of their names."""
    if isinstance(value, str):
        return texts.get(value, value)
    if isinstance(value, list):
        return [_restored(item, texts) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {name: _restored(item, texts) for name, item in cast("dict[str, Any]", value).items()}
    return value

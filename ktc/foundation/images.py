"""Images from outside: of a file or of a data URI, decoded by Pillow within limits, or refused with a reason.

In: a path or a data URI, and `ImageLimits`. Out: an RGB image, turned as its EXIF data says, as transformers makes it.
Refused (`ImageRefused`): other formats and drawings such as SVG, damaged and animated files, addresses of a network,
and everything beyond the limits, before it is decoded. HostLacks (H230) without Pillow. Nothing is fetched.
"""

from __future__ import annotations

import base64
import binascii
import re
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ktc.diagnostics import Diagnostic, HostLacks
from ktc.foundation import versions
from ktc.foundation.regular_files import PathRefused, read_regular

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_WITH_OTHERS: Final = "MPO"  # a JPEG picture with more behind it, such as a gain map, as phones write it
_LONGEST_SIDE: Final = 1 << 15
_URI: Final = re.compile(r"data:(image/[a-z0-9.+-]{1,40})((?:;[^;,]{0,100})*?)(;base64)?,", re.IGNORECASE)
_DRAWING: Final = re.compile(rb"\s*(<\?xml|<!--|<!doctype svg|<svg)", re.IGNORECASE)
_SUPPORTED: Final = f"convert it to {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """The most bytes of an image as it is stored, and the most pixels that it has."""

    num_bytes: int = 20 << 20
    pixels: int = 32 << 20  # 96 MiB as RGB

    @property
    def uri_length(self) -> int:
        """The most characters of a data URI."""
        return (self.num_bytes + 2) // 3 * 4 + 512


class ImageRefused(Exception):
    """An image that is not read; `hint` is what helps."""

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.hint = hint


def require_pillow() -> None:
    """Raise HostLacks (H230) without Pillow."""
    if versions.installed("pillow") is None:
        message = "images require `pillow`, not installed here"
        raise HostLacks(Diagnostic("H230", message, hint="`pip install 'ktc[images]'`"))


def read_image(path: Path, limits: ImageLimits) -> Image:
    """Return the image of a file as RGB. Raises ImageRefused and HostLacks (H230)."""
    require_pillow()
    try:
        content = read_regular(path, limits.num_bytes)
    except PathRefused as error:
        raise ImageRefused(f"it cannot be read: {error.strerror}") from error
    except OSError as error:
        raise ImageRefused(f"it cannot be read: {error.strerror or error}", "give the path of an image") from error
    return _decoded(content, limits)


def read_data_uri(uri: str, limits: ImageLimits) -> Image:
    """Return the image of a URI such as `data:image/png;base64,...` as RGB. Raises as `read_image` does."""
    require_pillow()
    scheme = uri[:40].partition(":")[0].lower()
    if scheme != "data" or not uri[:5].lower().startswith("data:"):
        given = f"an address of `{scheme}:`" if scheme.isalpha() and ":" in uri[:40] else "neither data nor an address"
        raise ImageRefused(f"it is {given}, and nothing is fetched", "send the image as `data:image/png;base64,...`")
    if len(uri) > limits.uri_length:
        raise ImageRefused(f"it has more than {limits.num_bytes} bytes", "make it smaller")
    head = _URI.match(uri)
    if head is None or not head[3]:
        raise ImageRefused("it is no image in base64", "a data URI begins with `data:image/png;base64,`")
    if head[1].lower().startswith("image/svg"):
        raise ImageRefused("it is an SVG drawing, not an image of pixels", _SUPPORTED)
    try:
        content = base64.b64decode(uri[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageRefused(f"its base64 is damaged: {error}") from error
    if len(content) > limits.num_bytes:
        raise ImageRefused(f"it has more than {limits.num_bytes} bytes", "make it smaller")
    return _decoded(content, limits)


def _decoded(content: bytes, limits: ImageLimits) -> Image:
    """Return the image of a file's bytes. Its size is read from its head, before memory is taken for pixels."""
    from PIL import Image, ImageOps

    if not content:
        raise ImageRefused("it is empty")
    if _DRAWING.match(content[:256]):
        raise ImageRefused("it is a drawing or a text, such as SVG, not an image of pixels", _SUPPORTED)
    _require_small_canvas(content, limits)
    with _refusing(), Image.open(BytesIO(content), formats=FORMATS) as opened:
        _require_size(*opened.size, limits)
        if opened.format != _WITH_OTHERS and getattr(opened, "is_animated", False):
            frames = getattr(opened, "n_frames", 2)
            raise ImageRefused(f"it is animated, with {frames} frames", "send one of them")
        opened.load()
        return ImageOps.exif_transpose(opened).convert("RGB")


def _require_small_canvas(content: bytes, limits: ImageLimits) -> None:
    """Check the size in the head of an extended WEBP file, for which Pillow takes the memory when it opens it."""
    if content[:4] == b"RIFF" and content[8:16] == b"WEBPVP8X" and len(content) >= 30:
        width, height = (int.from_bytes(content[at : at + 3], "little") + 1 for at in (24, 27))
        _require_size(width, height, limits)


def _require_size(width: int, height: int, limits: ImageLimits) -> None:
    if width * height > limits.pixels or max(width, height) > _LONGEST_SIDE:
        allowed = f"at most {limits.pixels} pixels are read, and {_LONGEST_SIDE} along a side"
        raise ImageRefused(f"it has {width} x {height} pixels, and {allowed}", "make it smaller")
    if not width or not height:
        raise ImageRefused(f"it has no pixels ({width} x {height})")


@contextmanager
def _refusing() -> Generator[None]:
    """Raise ImageRefused in place of what Pillow's readers raise, which is anything, and hide its warnings."""
    from PIL import UnidentifiedImageError
    from PIL.Image import DecompressionBombError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ImageRefused:
        raise
    except UnidentifiedImageError as error:
        raise ImageRefused(f"it is no image of a known format ({', '.join(FORMATS)})", _SUPPORTED) from error
    except DecompressionBombError as error:
        raise ImageRefused("it has too many pixels", "make it smaller") from error
    except MemoryError as error:
        raise ImageRefused("memory is missing for its pixels", "make it smaller") from error
    except Exception as error:  # readers of damaged files raise OSError, SyntaxError, ValueError and others
        words = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ImageRefused(f"it is damaged or incomplete: {words}", "save it again") from error

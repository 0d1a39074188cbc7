"""Images from outside: read as transformers reads them, or refused with a reason before they take memory."""

from __future__ import annotations

import base64
import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from ktc.diagnostics import HostLacks
from ktc.foundation import versions
from ktc.foundation.images import FORMATS, ImageLimits, ImageRefused, read_data_uri, read_image

SMALL = ImageLimits(num_bytes=1 << 16, pixels=1 << 14)


def picture(width: int = 24, height: int = 16, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(7).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def stored(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def uri(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def png_of(width: int, height: int) -> bytes:
    """Return a PNG file whose head promises so many pixels; its data are few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def webp_of(width: int, height: int) -> bytes:
    """Return a WEBP file whose head promises a canvas of this size."""
    body = b"WEBPVP8X" + struct.pack("<I", 10) + b"\0\0\0\0"
    body += (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF" + struct.pack("<I", len(body)) + body


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
@pytest.mark.parametrize("form", FORMATS)
def test_an_image_is_read_as_transformers_reads_it(form: str, mode: str, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    fits = mode if form in ("PNG", "GIF") or mode == "RGB" else "RGB"
    options: Any = {"exif": exif} if form in ("JPEG", "WEBP", "PNG") else {}
    content = stored(picture(mode=fits), form, **options)
    (tmp_path / "image").write_bytes(content)
    wanted = np.asarray(load_image(str(tmp_path / "image")))
    assert np.array_equal(np.asarray(read_image(tmp_path / "image", SMALL)), wanted)
    assert np.array_equal(np.asarray(read_data_uri(uri(content), SMALL)), wanted)


def test_a_photo_of_a_phone_is_its_first_picture() -> None:
    """Phones write a JPEG file with a second picture behind the first (MPO)."""
    content = stored(picture(), "MPO", save_all=True, append_images=[picture(12, 8)])
    with Image.open(io.BytesIO(content)) as opened:
        assert opened.format == "MPO" and getattr(opened, "n_frames", 1) == 2
        opened.seek(0)
        wanted = np.asarray(opened)
    assert np.array_equal(np.asarray(read_data_uri(uri(content, "image/jpeg"), SMALL)), wanted)


def animated(form: str) -> bytes:
    return stored(picture(), form, save_all=True, append_images=[picture(mode="L").convert("RGB")], duration=50)


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "it is empty"),
    "a text": (lambda: b"not an image", "no image of a known format"),
    "SVG": (lambda: b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "such as SVG"),
    "SVG alone": (lambda: b'  <svg width="9" height="9"/>', "such as SVG"),
    "TIFF": (lambda: stored(picture(), "TIFF"), "no image of a known format"),
    "a PDF": (lambda: b"%PDF-1.7\n1 0 obj", "no image of a known format"),
    "PostScript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image of a known format"),
    "a PNG in half": (lambda: stored(picture(), "PNG")[:400], "damaged or incomplete"),
    "a JPEG in half": (lambda: stored(picture(99, 99), "JPEG")[:900], "damaged or incomplete"),
    "a WEBP in half": (lambda: stored(picture(), "WEBP")[:99], "no image of a known format|damaged"),
    "a GIF in half": (lambda: stored(picture(mode="P"), "GIF")[:900], "damaged or incomplete"),
    "a BMP in half": (lambda: stored(picture(), "BMP")[:300], "damaged or incomplete"),
    "a head alone": (lambda: stored(picture(), "PNG")[:20], "no image of a known format|damaged"),
    "many pixels": (lambda: png_of(40000, 40000), "40000 x 40000 pixels|too many pixels"),
    "a few too many pixels": (lambda: png_of(200, 200), "200 x 200 pixels, and at most 16384"),
    "a long line": (lambda: png_of(1 << 20, 1), "1048576 x 1 pixels|at most"),
    "a large canvas": (lambda: webp_of(16384, 16384), "16384 x 16384 pixels"),
    "no pixels": (lambda: png_of(0, 9), "no pixels|damaged|no image"),
    "a text of a bomb": (
        lambda: stored(picture(), "PNG").replace(b"IDAT", b"zTXt", 1), "damaged or incomplete|no image"
    ),
    "many bytes": (lambda: stored(picture(), "PNG") + bytes(1 << 17), "more than 65536 bytes"),
    "an animated GIF": (lambda: animated("GIF"), "animated, with 2 frames"),
    "an animated PNG": (lambda: animated("PNG"), "animated, with 2 frames"),
    "an animated WEBP": (lambda: animated("WEBP"), "animated, with 2 frames"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_image_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    make, reason = HOSTILE[name]
    (tmp_path / "image.png").write_bytes(make())
    with pytest.raises(ImageRefused, match=reason):
        read_image(tmp_path / "image.png", SMALL)
    with pytest.raises(ImageRefused, match=reason):
        read_data_uri(uri(make()), SMALL)


URIS = {
    "http://127.0.0.1:9/a.png": "an address of `http:`, and nothing is fetched",
    "https://example.org/a.png": "an address of `https:`",
    "file:///etc/passwd": "an address of `file:`",
    "ftp://example.org/a.png": "an address of `ftp:`",
    "/etc/passwd": "neither data nor an address",
    "": "neither data nor an address",
    "data:": "no image in base64",
    "data:,text": "no image in base64",
    "data:image/png,raw": "no image in base64",
    "data:text/html;base64,PGI+": "no image in base64",
    "data:image/svg+xml;base64,PHN2Zy8+": "an SVG drawing",
    "data:image/png;base64,": "it is empty",
    "data:image/png;base64,****": "base64 is damaged",
    "data:image/png;base64,AAA": "base64 is damaged",
    "data:image/png;base64," + "A" * (1 << 17): "more than 65536 bytes",
    "data:image/png" + ";a" * 5000 + ",": "no image in base64",
}


@pytest.mark.parametrize("given", URIS, ids=lambda text: text[:40])
def test_nothing_but_an_image_in_base64_is_read_from_an_address(given: str) -> None:
    with pytest.raises(ImageRefused, match=URIS[given]):
        read_data_uri(given, SMALL)


def test_a_type_with_parameters_or_of_another_name_is_read() -> None:
    content = stored(picture(), "JPEG")
    for kind in ("image/jpg", "image/png;charset=x", "IMAGE/JPEG"):
        assert read_data_uri(uri(content, kind), SMALL).size == (24, 16)


def test_a_path_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (("pipe", "it is a pipe"), ("none", "No such file"), (".", "it is a folder")):
        with pytest.raises(ImageRefused, match=reason):
            read_image(tmp_path / name, SMALL)


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(versions, "installed", lambda _: None)
    with pytest.raises(HostLacks, match=r"H230.*pillow"):
        read_image(tmp_path / "image", SMALL)

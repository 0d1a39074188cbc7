"""Images that a command shows to a compiled model: the images of files, and the checkpoint's processor.

In: files, and the folder OUT. Out: RGB images, and transformers' processor. Refused: an image that is not read (G733),
a model that reads text alone (G731), a processor that cannot be read (G732).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktc.diagnostics import Diagnostic, InputRefused, Span
from ktc.foundation.images import ImageLimits, ImageRefused, read_image
from ktc.model.hf.processor import may_read_images, read_processor
from ktc.model.manifest.manifest import read_manifest

if TYPE_CHECKING:
    from PIL.Image import Image


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
    record = read_manifest(out).model
    if not may_read_images(out, record.class_name, record.own_code):
        left_out = " since it was compiled with `--text-only`" if record.left_out_bytes else ""
        message = f"`{out.name}` reads text alone{left_out}: its class is `{record.class_name}`"
        hint = "compile it without `--text-only`" if left_out else "leave the images out, or use a model with towers"
        raise InputRefused(Diagnostic("G731", message, hint=hint))
    return read_processor(out, "G732", trusted=trusted)

"""Names of GGUF files by the convention: `BaseName-SizeLabel-Version-Encoding-Type.gguf`.

The settings of a file have the same facts more reliably than its name, so names are written and never read.
"""

from __future__ import annotations

import re
from typing import Final

_ENDING: Final = ".gguf"


def file_name(base: str, size: str, version: str = "v1.0", encoding: str = "", kind: str = "") -> str:
    """Return a name by the convention, without a shard."""
    return "-".join(part for part in (base, size, version, encoding.upper(), kind) if part) + _ENDING


def name_of_model(folder: str) -> str:
    """Return the base name for a model's folder: letters, digits and single hyphens, and no run that mixes them up."""
    words = [re.sub(r"[^A-Za-z0-9]", "", word) for word in re.split(r"[-_. ]+", folder)]
    return "-".join(word if word[0].isalpha() or word.isdigit() else f"m{word}" for word in words if word) or "model"


def label_of(shared: int, expert: int, experts: int) -> str:
    """Return the label of a model's size: `7B`, or `8x7B` for weights of all layers with one of the experts."""
    prefix = f"{experts}x" if experts else ""
    number = shared + expert
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            scaled = number / size
            return f"{prefix}{scaled:.0f}{unit}" if scaled >= 10 else f"{prefix}{scaled:.1f}{unit}"
    return f"{prefix}{number / 1000:.1f}K"

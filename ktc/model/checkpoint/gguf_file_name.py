"""Names of GGUF files by the convention: read in two tiers, and written.

`BaseName-SizeLabel-FineTune-Version-Encoding-Type-Shard.gguf`, with `mmproj` or `mtp` before it. The convention
requires a version, which most published files lack. A name that does not follow it is read from its end: shard, type
and encoding, and the rest is the base name (`strict` is false). Time is linear in the length of a name; names of more
than 255 characters are not read. The settings of a file say the same more reliably than its name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, cast

_LONGEST: Final = 255
_ENDING: Final = ".gguf"
# Runs of the base name that begin with a letter and runs of digits are apart, so that there is one way to match.
_STRICT: Final = re.compile(
    r"(?:(?P<sidecar>mmproj|mtp)-)?"
    r"(?P<base>[A-Za-z0-9\s]*(?:-(?:[A-Za-z\s][A-Za-z0-9\s]*|[0-9][0-9\s]*|))*)"
    r"-(?:(?P<size>(?:\d+x)?(?:\d+\.)?\d+[A-Za-z](?:-[A-Za-z]+(?:\d+\.)?\d+[A-Za-z]+)?)(?:-(?P<tune>[A-Za-z0-9\s-]+))?)?"
    r"-(?P<version>v\d+(?:\.\d+)*)"
    r"(?:-(?P<encoding>(?!LoRA|vocab)[\w_]+))?"
    r"(?:-(?P<type>LoRA|vocab))?"
    r"(?:-(?P<shard>\d{5}-of-\d{5}))?\Z"
)
_SHARD: Final = re.compile(r"-(\d{5})-of-(\d{5})\Z")
_TYPE: Final = re.compile(r"-(LoRA|vocab)\Z")
_ENCODING: Final = re.compile(r"[-.](I?Q[1-8]_[0-9A-Z_]+|TQ[12]_0|MXFP4(?:_MOE)?|NVFP4|BF16|F16|F32)\Z", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class GgufName:
    """The parts of a name, "" for those that it lacks. `shard` counts from 1. `strict`: it follows the convention."""

    base: str
    size: str = ""
    tune: str = ""
    version: str = "v1.0"
    encoding: str = ""
    type: str = ""
    shard: tuple[int, int] | None = None
    sidecar: str = ""
    strict: bool = True


def read_file_name(name: str) -> GgufName | None:
    """Return the parts of a file's name, or None if it is not the name of a GGUF file, or its shard is impossible."""
    if len(name) > _LONGEST or not name.endswith(_ENDING) or len(name) == len(_ENDING):
        return None
    stem = name.removesuffix(_ENDING)
    found = _STRICT.match(stem)
    if found is None:
        return _lenient(stem)
    base, size, tune, version, encoding, kind, shard, sidecar = (
        cast("str | None", found[part]) or ""
        for part in ("base", "size", "tune", "version", "encoding", "type", "shard", "sidecar")
    )
    number = _shard(shard)
    if _is_impossible(number):
        return None
    return GgufName(base, size, tune, version, encoding, kind, number, sidecar)


def _lenient(stem: str) -> GgufName | None:
    shard = _SHARD.search(stem)
    number = (int(shard[1]), int(shard[2])) if shard else None
    stem = stem[: shard.start()] if shard else stem
    kind = _TYPE.search(stem)
    stem = stem[: kind.start()] if kind else stem
    encoding = _ENCODING.search(stem)
    stem = stem[: encoding.start()] if encoding else stem
    if not stem or _is_impossible(number):
        return None
    return GgufName(
        stem, encoding=encoding[1] if encoding else "", type=kind[1] if kind else "", shard=number, strict=False
    )


def _shard(text: str) -> tuple[int, int] | None:
    return (int(text[:5]), int(text[-5:])) if text else None


def _is_impossible(shard: tuple[int, int] | None) -> bool:
    return shard is not None and not 1 <= shard[0] <= shard[1]


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

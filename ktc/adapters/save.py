"""Adapter folders written: a config and tensors in, the two files that PEFT reads out.

Refused: a place where something is already (A609).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from ktc.adapters.conversion import RECORD, read_record
from ktc.adapters.folder import CONFIG, WEIGHTS
from ktc.diagnostics import Diagnostic, InputRefused, listing

if TYPE_CHECKING:
    from torch import Tensor

WRITTEN_BY: Final = "ktc.written_by"
"""The key by which exports are known, in the metadata of safetensors and of GGUF files."""
EXPORT: Final = "ktc export"
_BESIDE: Final = "adapter_ktc.json"  # of `ktc.model.loading.trained_beside`, which imports torch


def require_new(path: Path, force: bool = False, reads: Sequence[Path | None] = ()) -> None:
    """Raise InputRefused (A609) if something is at `path`.

    `force` permits a file or folder that ktc wrote, unless it is, or contains, one of those that the work `reads`.
    """
    if not os.path.lexists(path):
        return
    message, hint = f"`{path}` exists already", "name another with `-o`, or remove it first"
    foreign = "it is a link" if path.is_symlink() else _not_of_ktc(path)
    replaceable = not foreign
    if not force:
        hint = "`--force` replaces it, `-o` names another" if replaceable else hint
        raise InputRefused(Diagnostic("A609", message, hint=hint))
    if not replaceable:
        message = f"{message}, and `--force` replaces only an export, a merged or a quantised model; {foreign}"
        raise InputRefused(Diagnostic("A609", message, hint=hint))
    place = path.resolve()
    if any(source is not None and source.resolve().is_relative_to(place) for source in reads):
        message = f"`{path}` is read to make the new one, so it cannot be replaced"
        raise InputRefused(Diagnostic("A609", message, hint="name another with `-o`"))


def _not_of_ktc(path: Path) -> str:
    """Return why a file or a folder is not as an export, a merge or a quantisation wrote it, "" if it is."""
    if path.is_file():
        return "" if path.suffix == ".gguf" and _is_gguf_export(path) else "no command of ktc wrote this file"
    if not path.is_dir():
        return "neither a file nor a folder is there"
    names = {entry.name for entry in path.iterdir() if entry.is_file()}
    if RECORD in names:
        try:
            record = read_record(path)
        except InputRefused as refusal:
            return refusal.diagnostics[0].message
        written = {RECORD, *record.files, *record.others}
    elif WEIGHTS in names and _is_adapter_export(path / WEIGHTS):
        written = {CONFIG, WEIGHTS, _BESIDE}
    else:
        return "no record of ktc is in this folder"
    more = sorted({entry.name for entry in path.iterdir()} - (written & names))
    return f"ktc did not write {listing(more, 3)} in it" if more else ""


def _is_adapter_export(weights: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        with cast("Any", safe_open)(weights, framework="numpy") as file:
            metadata: dict[str, str] = file.metadata() or {}
    except (OSError, SafetensorError):
        return False
    return metadata.get(WRITTEN_BY) == EXPORT


def _is_gguf_export(path: Path) -> bool:
    from ktc.model.checkpoint.gguf_header import read_gguf_header
    from ktc.model.checkpoint.header import HeaderRefused

    try:
        return read_gguf_header(path).settings.get(WRITTEN_BY) == EXPORT
    except (OSError, HeaderRefused):
        return False


def save_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write the config and the weights of an adapter into `folder`."""
    from safetensors import torch as safetensors

    text = json.dumps(dict(config), indent=2, sort_keys=True) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}  # cut out of a stack, they can be views
    metadata = {"format": "pt", WRITTEN_BY: EXPORT}
    cast("Any", safetensors).save_file(whole, folder / WEIGHTS, metadata=metadata)

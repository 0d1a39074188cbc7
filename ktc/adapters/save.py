"""Adapter folders written: a config and tensors in, the two files that PEFT reads out.

Refused: a place where something is already (A609).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from ktc.adapters.conversion import RECORD
from ktc.adapters.folder import CONFIG, WEIGHTS
from ktc.diagnostics import Diagnostic, InputRefused

if TYPE_CHECKING:
    from torch import Tensor

_BESIDE: Final = "adapter_ktc.json"  # of `ktc.model.loading.trained_beside`, which imports torch


def require_new(path: Path, force: bool = False, reads: Sequence[Path | None] = ()) -> None:
    """Raise InputRefused (A609) if something is at `path`.

    `force` permits a file or folder that ktc wrote, unless it is, or contains, one of those that the work `reads`.
    """
    if not os.path.lexists(path):
        return
    message, hint = f"`{path}` exists already", "name another with `-o`, or remove it first"
    replaceable = not path.is_symlink() and _is_written_by_ktc(path)
    if not force:
        hint = "`--force` replaces it, `-o` names another" if replaceable else hint
        raise InputRefused(Diagnostic("A609", message, hint=hint))
    if not replaceable:
        message = f"{message}, and `--force` replaces only an export, a merged or a quantised model"
        raise InputRefused(Diagnostic("A609", message, hint=hint))
    place = path.resolve()
    if any(source is not None and source.resolve().is_relative_to(place) for source in reads):
        message = f"`{path}` is read to make the new one, so it cannot be replaced"
        raise InputRefused(Diagnostic("A609", message, hint="name another with `-o`"))


def _is_written_by_ktc(path: Path) -> bool:
    """Return whether a conversion is at `path`, a GGUF file, or an adapter alone, without its run."""
    if path.is_file():
        return path.suffix == ".gguf"
    names = {entry.name for entry in path.iterdir()}
    return RECORD in names or (CONFIG in names and names <= {CONFIG, WEIGHTS, _BESIDE})


def save_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write the config and the weights of an adapter into `folder`."""
    from safetensors import torch as safetensors

    text = json.dumps(dict(config), indent=2, sort_keys=True) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}  # cut out of a stack, they can be views
    cast("Any", safetensors).save_file(whole, folder / WEIGHTS, metadata={"format": "pt"})

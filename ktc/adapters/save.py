"""Adapter folders written: a config and tensors in, the two files that PEFT reads out.

Refused: a place where something is already (A609).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ktc.adapters.folder import CONFIG, WEIGHTS
from ktc.diagnostics import Diagnostic, InputRefused

if TYPE_CHECKING:
    from torch import Tensor


def require_new(path: Path) -> None:
    """Raise InputRefused (A609) if something is at `path`."""
    if path.exists():
        message = f"`{path}` exists already"
        raise InputRefused(Diagnostic("A609", message, hint="name another with `-o`, or remove it first"))


def save_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write the config and the weights of an adapter into `folder`."""
    from safetensors import torch as safetensors

    text = json.dumps(dict(config), indent=2, sort_keys=True) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}  # cut out of a stack, they can be views
    cast("Any", safetensors).save_file(whole, folder / WEIGHTS, metadata={"format": "pt"})

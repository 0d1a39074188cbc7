"""Copies of a model that runs, for each side of a comparison.

Objects that Python does not copy, such as locks and generators, are shared. Code that counts with one then differs
between the sides, and keeps its block.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar, cast

from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def copied(model: M) -> M:
    """Return a copy of the module with equal weights."""
    try:
        return copy.deepcopy(model)
    except Exception:  # noqa: BLE001 - objects refuse to be copied with any exception
        shared = {id(value): value for value in _not_copied(model)}
        return copy.deepcopy(model, cast("dict[int, Any]", shared))


def _not_copied(model: nn.Module) -> list[object]:
    """Return the attributes of the modules that Python does not copy."""
    shared: list[object] = []
    for module in model.modules():
        for name, value in vars(module).items():
            if name in ("_modules", "_parameters", "_buffers") or isinstance(value, nn.Module | Tensor):
                continue
            try:
                copy.deepcopy(value)
            except Exception:  # noqa: BLE001 - as above
                shared.append(value)
    return shared

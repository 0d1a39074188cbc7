"""Non-persistent buffers (rotary frequencies): recomputed by the module that owns them.

In: a model whose non-persistent buffers are on meta. Out: the same model with their values. Refused: a buffer that its
module cannot make from the config.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.experts.private_api import unsaved_buffers
from ktc.model.hf.private_api import initialise_buffers
from ktc.model.packed_store.placement import device_of


def compute_buffers(model: nn.Module, placement: Mapping[str, str]) -> None:
    """Give every non-persistent buffer of `model` its value, in its own dtype, on the device of its module.

    Raises `InputRefused` (L421) with the buffers that cannot be computed.
    """
    problems: list[Diagnostic] = []
    for fqn, module in cast("Iterator[tuple[str, nn.Module]]", model.named_modules()):
        names = [name for name in _non_persistent(module) if getattr(module, name).is_meta]
        if not names:
            continue
        made = _made_again(module, _config_of(model, fqn))
        for name in names:
            value = getattr(made, name, None) if made is not None else _initialised(model, module, name)
            if not isinstance(value, Tensor):
                hint = "report the model family; its buffer is neither in the checkpoint nor a function of the config"
                problems.append(Diagnostic("L421", f"buffer `{fqn}.{name}` cannot be computed", hint=hint))
                continue
            setattr(module, name, value.to(device_of(fqn, placement), getattr(module, name).dtype))
    if problems:
        raise InputRefused(*problems)


def _non_persistent(module: nn.Module) -> Iterator[str]:
    absent = unsaved_buffers(module)
    return (name for name, _ in module.named_buffers(recurse=False) if name in absent)


def _config_of(model: nn.Module, fqn: str) -> object:
    """Return the config of a module, or of the nearest one around it that has one: a tower's, not the model's."""
    parts = fqn.split(".") if fqn else []
    around = (model.get_submodule(".".join(parts[:count])) for count in range(len(parts), -1, -1))
    return next((vars(module)["config"] for module in around if "config" in vars(module)), None)


def _made_again(module: nn.Module, config: object) -> nn.Module | None:
    """Make a new module of the same class from the config, on the CPU; `None` if its constructor needs more."""
    make = cast("Any", type(module))
    try:
        with torch.device("cpu"):
            return cast("nn.Module", make(config=config))
    except TypeError:
        return None


def _initialised(model: nn.Module, module: nn.Module, name: str) -> Tensor | None:
    """Return the value of a float buffer after the model's own initialisation; `None` if it sets none.

    The parameters beside it are marked as loaded, in the way of transformers, so that they keep their values.
    """
    placeholder = getattr(module, name)
    if not placeholder.is_floating_point():
        return None
    setattr(module, name, torch.full_like(placeholder, torch.nan, device="cpu"))
    is_set = initialise_buffers(model, module)
    value = cast("Tensor", getattr(module, name))
    setattr(module, name, placeholder)
    return value if is_set and not value.isnan().any() else None

"""Side effects of a forward: attributes, buffers and lists that a model's code changes.

An auxiliary loss is often such an attribute, and the training loop of its author reads it. `changes` runs a forward and
returns all that it changed, by name.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedConfig

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_OWN_CODE = "transformers_modules."
Place = tuple[str, str]  # the name of a module of the tree, or of a Python module after a colon; an attribute


def changes(model: nn.Module, forward: Callable[[], object]) -> dict[Place, list[Any]]:
    """Run `forward` and return the numbers and tensors of every place that it changed.

    Global values of the model's Python modules are put back, so that a second model begins as the first did.
    """
    globals_before = [(owner, name, copy.copy(value)) for _, owner, name, value in _globals(model)]
    before = {place: _fingerprint(value) for place, value in _places(model)}
    forward()
    changed = {place: leaves(value) for place, value in _places(model) if before.get(place) != _fingerprint(value)}
    for owner, name, value in globals_before:
        held = owner[name]
        if isinstance(held, list):
            held[:] = value
        elif isinstance(held, dict):
            held.clear()
            held.update(value)
        else:
            owner[name] = value
    return changed


def leaves(value: object) -> list[Any]:
    """Return the numbers and tensors in a value."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor | int | float)]


def _places(model: nn.Module) -> Iterator[tuple[Place, object]]:
    for name, module in model.named_modules():
        for attribute, value in [*vars(module).items(), *module.named_buffers(recurse=False)]:
            if attribute not in _OF_EVERY_MODULE and attribute != "training":
                yield from ((place, v) for place, _, _, v in _values(name, vars(module), attribute, value))
    yield from ((place, value) for place, _, _, value in _globals(model))


def _globals(model: nn.Module) -> Iterator[tuple[Place, dict[str, Any], str, Any]]:
    """Yield the values that the model's Python files hold: their place, owner and name there."""
    for file in sorted({base.__module__ for module in model.modules() for base in type(module).__mro__}):
        if file.startswith(_OWN_CODE):
            names = vars(sys.modules[file])
            for name, value in list(names.items()):
                if not name.startswith("__") and value is not None:
                    yield from _values(f":{file.rpartition('.')[2]}", names, name, value)


def _values(
    owner: str, held: dict[str, Any], name: str, value: Any
) -> Iterator[tuple[Place, dict[str, Any], str, Any]]:
    """Yield the value if it is made of numbers; for an object of the model's own class, its attributes."""
    if _holds_numbers(value):
        yield (owner, name), held, name, value
    elif type(value).__module__.startswith(_OWN_CODE) and not isinstance(value, nn.Module | PreTrainedConfig):
        for inner, part in vars(value).items():
            if _holds_numbers(part):
                yield (f"{owner}.{name}", inner), vars(value), inner, part


def _holds_numbers(value: object) -> bool:
    if isinstance(value, list | tuple | dict):
        return all(isinstance(leaf, Tensor | int | float) for leaf in pytree.tree_leaves(value))
    return value is None or isinstance(value, Tensor | int | float)


def _fingerprint(value: object) -> list[object]:
    """Return a value that differs if anything in `value` was replaced or changed in place."""
    parts = pytree.tree_leaves(value)
    return [(id(part), part.detach().tolist()) if isinstance(part, Tensor) else part for part in parts]


def scalar(values: Mapping[Place, list[Any] | None]) -> Tensor | None:
    """Return the sum of squares of everything that has a gradient; None if nothing has one."""
    tensors = [leaf for found in values.values() for leaf in found or () if isinstance(leaf, Tensor)]
    parts = [leaf.float().pow(2).sum() for leaf in tensors if leaf.requires_grad]
    return torch.stack(parts).sum() if parts else None

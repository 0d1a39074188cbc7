"""Groups of a model's tensors that are in memory together: each decoder layer, and all tensors outside of the layers.

In: names of tensors and of the list of layers. Out: groups, by the layer's module name, or `OUTSIDE`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, cast

from torch import Tensor, nn

from ktc.model.experts.module import FusedMoe

OUTSIDE: Final = ""


def group_of(name: str, layers: str) -> str:
    """Return the group of a tensor or module by its full name."""
    if not name.startswith(f"{layers}."):
        return OUTSIDE
    return f"{layers}.{name[len(layers) + 1 :].partition('.')[0]}"


def inside(path: str, around: str) -> bool:
    """Return whether a module's path is `around` or below it."""
    return path == around or path.startswith(f"{around}.")


def module_of(model: nn.Module, group: str) -> nn.Module:
    """Return the module of a group: a layer, or the model."""
    return model.get_submodule(group)


def tensors_of(model: nn.Module, layers: str, group: str) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield each registered tensor of a group: its full name, the module that owns it, and its name there.

    Experts that ktc runs register none; their stock tensors are only shapes.
    """
    modules = cast("Iterator[tuple[str, nn.Module]]", module_of(model, group).named_modules())
    for path, module in list(modules):
        prefix = ".".join(part for part in (group, path) if part)
        if isinstance(module, FusedMoe):
            continue
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for leaf in [leaf for leaf, _ in own]:
            name = f"{prefix}.{leaf}" if prefix else leaf
            if group_of(name, layers) == group:
                yield name, module, leaf


def put(owner: nn.Module, leaf: str, tensor: Tensor) -> None:
    """Replace a tensor of a module; a parameter stays one, without gradients."""
    was = getattr(owner, leaf)
    setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False) if isinstance(was, nn.Parameter) else tensor)

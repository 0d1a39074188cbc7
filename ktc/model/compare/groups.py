"""Groups of a model's tensors that are in memory together: each decoder layer, and all tensors outside of the layers.

In: names of tensors and of the list of layers. Out: groups, by the layer's module name, or `OUTSIDE`. Refused: a model
whose rewrites are not in one list of layers (N602).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, cast

from torch import Tensor, nn

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.experts.module import FusedMoe
from ktc.model.manifest.manifest import Rewrite

OUTSIDE: Final = ""


def list_of_layers(model: nn.Module, rewrites: Sequence[Rewrite]) -> str:
    """Return the name of the `ModuleList` that holds every rewritten layer. Raises InputRefused (N602)."""
    modules = dict(cast("Iterator[tuple[str, nn.Module]]", model.named_modules()))
    lists: dict[str, None] = {}
    for step in rewrites:
        parts = step.fqn.split(".")
        around = (".".join(parts[:count]) for count in range(1, len(parts)))
        lists |= dict.fromkeys([path for path in around if isinstance(modules.get(path), nn.ModuleList)][:1])
    if len(lists) != 1:
        what = "no list of layers holds its rewrites" if not lists else f"its rewrites are in {', '.join(lists)}"
        raise InputRefused(not_by_layer(what))
    return next(iter(lists))


def not_by_layer(what: str) -> Diagnostic:
    """Return the diagnostic (N602) about a model that cannot be run layer by layer."""
    hint = "compare whole answers instead: `ktc eval`, or `ktc.load(OUT, reference=True)` beside `ktc.load(OUT)`"
    return Diagnostic("N602", f"the model cannot be compared layer by layer: {what}", hint=hint)


def group_of(name: str, layers: str) -> str:
    """Return the group of a tensor or module by its full name."""
    if not name.startswith(f"{layers}."):
        return OUTSIDE
    return f"{layers}.{name[len(layers) + 1 :].partition('.')[0]}"


def tensors_of(model: nn.Module, layers: str, group: str) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield each registered tensor of a group: its full name, the module that owns it, and its name there.

    Experts that ktc runs register none; their stock tensors are only shapes.
    """
    modules = cast("Iterator[tuple[str, nn.Module]]", model.get_submodule(group).named_modules())
    for path, module in list(modules):
        prefix = ".".join(part for part in (group, path) if part)
        if isinstance(module, FusedMoe):
            continue
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for leaf in [leaf for leaf, _ in tensors]:
            name = f"{prefix}.{leaf}" if prefix else leaf
            if group_of(name, layers) == group:
                yield name, module, leaf


def put(owner: nn.Module, leaf: str, tensor: Tensor) -> None:
    """Replace a tensor of a module; a parameter stays one, without gradients."""
    was = getattr(owner, leaf)
    setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False) if isinstance(was, nn.Parameter) else tensor)

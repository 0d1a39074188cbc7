"""A table of embeddings in host memory, whose rows a GPU reads over the bus.

In: a loaded table on the host, and a GPU. Out: the same module; its weight is a tensor of the GPU whose memory is the
host's, page-locked. So stock code, masks and captured steps work as with a table on the GPU, and a token costs one row
over the bus. Where the system locks no pages, or another GPU sees them at other addresses, the table goes to the GPU:
a warning (L459, L455) says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ktc.model.experts.call_memory import seen_by
from ktc.model.experts.page_lock import page_lock
from ktc.model.manifest.configs import HOST_TABLE
from ktc.model.manifest.manifest import Rewrite

_ON_HOST = "ktc_on_host"  # an attribute of a weight, whose device is a GPU


def with_tables(placement: Mapping[str, str], recipe: Sequence[Rewrite]) -> dict[str, str]:
    """Return where weights are read to: tables of a recipe to the host, for a model that is placed."""
    tables = [step.fqn for step in recipe if step.module == HOST_TABLE] if placement else []
    return {**placement, **dict.fromkeys(tables, "cpu")}


def show_tables(model: nn.Module, recipe: Sequence[Rewrite]) -> None:
    """Let GPUs read the tables of a recipe, which are loaded."""
    for step in recipe:
        if step.module == HOST_TABLE:
            _show(model.get_submodule(step.fqn), torch.device(step.device))


def is_on_host(weight: Tensor) -> bool:
    """Return whether a GPU's tensor is a table that the plan has in host memory."""
    return bool(getattr(weight, _ON_HOST, False))


def _show(module: nn.Module, device: torch.device) -> None:
    weight = cast("Tensor", module.weight).detach()
    memory = weight.flatten().view(torch.uint8)
    locked = device.type == "cuda" and weight.device.type == "cpu" and page_lock(memory, module)
    seen = seen_by(memory, device) if locked else None
    shown = weight.to(device) if seen is None else seen.view(weight.dtype).view(weight.shape)
    module.weight = nn.Parameter(shown, requires_grad=False)
    setattr(module.weight, _ON_HOST, True)

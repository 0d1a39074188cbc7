"""A table of embeddings in host memory, whose rows a GPU reads over the bus.

In: a loaded table on the host, and a GPU. Out: the same module; its weight is a tensor of the GPU whose memory is the
host's, page-locked. So stock code, masks and captured steps work as with a table on the GPU, and a token costs one row
over the bus. Where the system locks no pages, or they are locked for another GPU, the table goes to the GPU with a
warning (L467), and counts there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ktc.diagnostics import Diagnostic, render
from ktc.model.experts.host.call_memory import view_of
from ktc.model.experts.host.page_lock import more_to_lock, page_lock
from ktc.model.manifest.configs import HOST_TABLE
from ktc.model.manifest.manifest import Rewrite

log = logging.getLogger(__name__)

_SHOWN = "ktc_shown"  # an attribute of a weight whose device is a GPU: its address in host memory


def with_tables(placement: Mapping[str, str], recipe: Sequence[Rewrite]) -> dict[str, str]:
    """Return where weights are read to: tables of a recipe to the host, for a model that is placed."""
    tables = [step.fqn for step in recipe if step.module == HOST_TABLE] if placement else []
    return {**placement, **dict.fromkeys(tables, "cpu")}


def show_tables(model: nn.Module, recipe: Sequence[Rewrite]) -> None:
    """Let GPUs read the tables of a recipe, which are loaded."""
    for step in recipe:
        if step.module == HOST_TABLE:
            _show(step.fqn, model.get_submodule(step.fqn), torch.device(step.device))


def is_on_host(weight: Tensor) -> bool:
    """Return whether a GPU's tensor is a table that the plan has in host memory.

    PyTorch and transformers put other memory into a parameter that stays (`to`, `resize_token_embeddings`).
    """
    shown = getattr(weight, _SHOWN, None)
    return shown is not None and shown == weight.data_ptr()


def _show(fqn: str, module: nn.Module, device: torch.device) -> None:
    weight = cast("Tensor", module.weight).detach()
    seen = _seen_rows(fqn, weight, device) if device.type == "cuda" and weight.device.type == "cpu" else None
    module.weight = nn.Parameter(weight.to(device) if seen is None else seen, requires_grad=False)
    if seen is not None:
        setattr(module.weight, _SHOWN, seen.data_ptr())


def _seen_rows(fqn: str, weight: Tensor, device: torch.device) -> Tensor | None:
    """Return a table as a GPU sees it, None with a warning (L467).

    The pages are locked until the last tensor over them is gone, also where the module was deleted before.
    """
    memory = weight.flatten().view(torch.uint8)
    with torch.cuda.device(device):  # CUDA locks for the current GPU
        locked = page_lock(memory, memory, warns=False)
        seen = view_of(memory, device) if locked else None
    if seen is not None:
        return seen.view(weight.dtype).view(weight.shape)
    why = "another GPU locked its pages" if locked else "the system locks none of its pages"
    message = f"the table `{fqn}` is planned in host memory and takes {weight.nbytes / 2**20:,.0f} MiB of `{device}`"
    hint = "let the process see one GPU (`CUDA_VISIBLE_DEVICES`)" if locked else more_to_lock()
    log.warning("%s", render([Diagnostic("L467", f"{message}: {why}", hint=hint, severity="warning")]))
    return None

"""Where each tensor of a compiled model lies, and how activations follow: module names to devices.

The entry of the nearest ancestor counts. A module that the placement names receives its inputs on its own device,
wherever the module before it stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ktc.diagnostics import Diagnostic, HostLacks


def device_of(fqn: str, placement: Mapping[str, str]) -> torch.device:
    """The device of the module or tensor `fqn`: the entry of itself or of its nearest ancestor, else the CPU."""
    while fqn not in placement and fqn:
        fqn = fqn.rpartition(".")[0]
    return torch.device(placement.get(fqn, "cpu"))


def check_devices(placement: Mapping[str, str]) -> None:
    """Raises `HostLacks` (L409) for the devices that this process does not see."""
    seen = torch.cuda.device_count()
    absent = {
        name for name in placement.values() if (d := torch.device(name)).type == "cuda" and (d.index or 0) >= seen
    }
    if absent:
        names = ", ".join(f"`{name}`" for name in sorted(absent))
        hint = "compile it again on this machine, or make the GPUs visible"
        raise HostLacks(
            Diagnostic("L409", f"the model was placed on {names}; this process sees {seen} GPUs", hint=hint)
        )


def follow(model: nn.Module, placement: Mapping[str, str]) -> None:
    """Move activations along: inputs of a placed module go to its device. Nothing to do where all is on one device."""
    if len(set(placement.values()) | {"cpu"}) == 1:
        return
    modules = dict(cast("Iterator[tuple[str, nn.Module]]", model.named_modules()))
    for fqn in placement:
        if fqn in modules and fqn:
            modules[fqn].register_forward_pre_hook(_Mover(device_of(fqn, placement)), with_kwargs=True)


class _Mover:
    """A forward pre-hook that brings tensors to `device`; a cache stays where its layers keep it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(self._device), (args, kwargs))


def device_map(placement: Mapping[str, str]) -> dict[str, str | int] | None:
    """The placement as Hugging Face's `hf_device_map`, `None` where it names one device only."""
    if len(set(placement.values())) < 2:
        return None
    return {
        fqn: int(name.partition(":")[2] or 0) if name.startswith("cuda") else name for fqn, name in placement.items()
    }

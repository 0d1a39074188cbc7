"""Whether the weights of a measured model fit this machine, by layer: an estimate before anything is allocated.

In: an analysis. Refused (H240): a device without room for its weights, with the number of layers that would fit.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping

import psutil
from torch import Tensor

from ktc.diagnostics import Diagnostic, HostLacks
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.model.kernels.packed_size import packed_bytes
from ktc.stages.analysis import Analysis
from ktc.stages.plan.placement import device_of, gib
from ktc.tools.bench.requests import Finetune

_BASE = 3 << 30  # host memory of the process itself, and of what is made before it is copied
_FP32 = 4  # bytes of each value of the reference, which is there beside the measured model
Bytes = Counter[str]


def require_room(analysis: Analysis, request: Finetune) -> None:
    """Raise HostLacks (H240) with the missing bytes and the number of layers that would fit."""
    free, rest, layers = _free(analysis), *_bytes(analysis, request)
    totals = list(itertools.accumulate(layers, initial=rest))  # of the first 0, 1, 2, ... layers
    fitting = sum(_fits(total, free) for total in totals) - 1
    if fitting >= len(layers):
        return
    whole = totals[-1]
    device = next(device for device in whole if whole[device] > free.get(device, whole[device]))
    message = (
        f"{len(layers)} layers of this model need {gib(whole[device])} on `{device}`, and {gib(free[device])} are free"
    )
    smaller = "choose a smaller `--format`"
    hint = f"`--layers {fitting}` would fit; or {smaller}" if fitting > 0 else f"not one layer fits: {smaller}"
    raise HostLacks(Diagnostic("H240", message, hint=hint))


def _free(analysis: Analysis) -> Mapping[str, int]:
    """Return the bytes that each device may hold: its budget, and of the host's memory the part that is free."""
    budgets = {usage.device: usage.budget for usage in analysis.plan.devices if usage.budget is not None}
    available = psutil.virtual_memory().available - _BASE
    return {**budgets, "cpu": min(available, budgets.get("cpu", available))}


def _bytes(analysis: Analysis, request: Finetune) -> tuple[Bytes, list[Bytes]]:
    """Return the bytes by device outside of the layers, and of each layer."""
    captured, plan = analysis.captured, analysis.plan
    placements = {entry.fqn: entry.device for entry in plan.placements} | {entry.fqn: "cpu" for entry in plan.streams}
    numbers = {site.layer for site in captured.sites}
    site = captured.sites[0]
    stem = f"{site.fqn.partition(f'.{site.layer}.')[0]}."
    rest, layers = Bytes(), {number: Bytes() for number in sorted(numbers)}

    def add(fqn: str, device: str, size: int) -> None:
        number = fqn.removeprefix(stem).partition(".")[0] if fqn.startswith(stem) else ""
        (layers.get(int(number), rest) if number.isdigit() else rest)[device] += size

    experts = _experts(analysis)
    tensors: list[tuple[str, Tensor]] = [*captured.model.named_parameters(), *captured.model.named_buffers()]
    for name, tensor in tensors:
        owner = name.rpartition(".")[0]
        if "reference" in request.experts:
            add(name, "cpu", _FP32 * tensor.numel())
        if owner not in experts:
            add(name, device_of(owner, placements), tensor.numel() * tensor.element_size())
    hidden = int(captured.facts["hidden"])
    for fqn, spec in experts.items():
        saved = 2 * request.tokens * hidden  # hidden states in bf16, which streamed experts keep on the host
        add(fqn, "cpu", packed_bytes(spec) + saved)
    for usage in plan.devices:
        rest[usage.device] += usage.adapter + usage.streaming
    return rest, list(layers.values())


def _experts(analysis: Analysis) -> Mapping[str, FusedMoeSpec]:
    """Return the kernel of every experts module by FQN."""
    return {
        action.at(site.fqn): action.kernel
        for rewrite in analysis.plan.rewrites
        for site in rewrite.sites
        for action in rewrite.actions
        if isinstance(action.kernel, FusedMoeSpec)
    }


def _fits(total: Bytes, free: Mapping[str, int]) -> bool:
    return all(size <= free.get(device, size) for device, size in total.items())

"""Devices: their names, the device of a module, and what a device may hold.

A module is on the device of its nearest placed ancestor; that is inheritance, not conflict.
"""

from __future__ import annotations

from collections.abc import Mapping

from ktc.diagnostics import Diagnostic, HostLacks
from ktc.foundation.host import Host
from ktc.foundation.module_paths import from_inside
from ktc.language.dsl.ruleset import RuleSet
from ktc.model.targets.node_plan import Claim

BUDGET_SHARE = 0.9  # of a device's free memory, where the program sets no budget: a context and fragments need some


def require_gpu(device: str, setting: str, claim: Claim, host: Host) -> None:
    """Raise HostLacks (M069) for a GPU that the host lacks."""
    if not device.startswith("cuda:") or int(device.removeprefix("cuda:")) < len(host.gpus):
        return
    wanted, instead = claim.target.name, "write `cpu_moe`"
    if not claim.target.stays_on_gpu:
        wanted = f"place({setting} = {device})" if setting else f"place({device})"
        instead = f"use `{setting or 'device'} = auto` or `cpu`"
    message = f"`{wanted}`: this host has {len(host.gpus)} GPUs"
    hint = f"{instead}, or describe the target machine with `--host FILE`"
    raise HostLacks(Diagnostic("M069", message, claim.span, hint=hint))


def resolve_device(device: str, host: Host) -> str:
    """Resolve `auto` to the first GPU, or to the CPU without one."""
    if device == "cuda":
        return "cuda:0"
    return ("cuda:0" if host.gpus else "cpu") if device == "auto" else device


def device_of(path: str, placements: Mapping[str, str]) -> str:
    """Return the device of the nearest placed ancestor of `path`."""
    return next(placements[around] for around in from_inside(path) if around in placements)


def budget_of(device: str, rules: RuleSet, host: Host) -> int | None:
    """Return the bytes that a device may hold: the `plan` budget or a share of what is free; None if unknown."""
    budget = rules.plan.get(device)
    if isinstance(budget, int):
        return budget
    if device == "cpu":
        return int(host.memory * BUDGET_SHARE)
    number = int(device.partition(":")[2] or 0)
    return int(host.gpus[number].free * BUDGET_SHARE) if number < len(host.gpus) else None


def gib(size: int) -> str:
    """Bytes as a person reads them: `15.0 GiB`, `3.2 MiB`."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size} B"

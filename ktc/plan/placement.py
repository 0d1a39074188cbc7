"""Placement: the device of every module, and the bytes of weights that lie on each device.

A module stands where its nearest placed ancestor stands; that is inheritance, not conflict. Experts stand where their
kernel runs. What no rule places goes to `plan.unplaced`, the host's memory if that is not set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ktc.capture import CapturedModel
from ktc.diagnostics import Diagnostic, HostLacks
from ktc.dsl.ruleset import RuleSet
from ktc.host import Host
from ktc.plan.kernel_spec import BITS_PER_WEIGHT, KernelSpec
from ktc.plan.types import Claim, DeviceLoad, Placement

BUDGET_SHARE = 0.9  # of a device's memory, where the program sets no budget


def place(claims: Sequence[Claim], rules: RuleSet, host: Host) -> tuple[Placement, ...]:
    """Every explicit placement, `auto` resolved, the root first. Raises HostLacks for a GPU the host has not."""
    default = resolve_device(str(rules.plan.get("unplaced") or "cpu"), host)
    placed = [Placement("", default, "", None)]
    missing: list[Diagnostic] = []
    for claim in claims:
        if claim.target != "place":
            continue
        device = resolve_device(str(claim.settings["device"]), host)
        if device.startswith("cuda:") and int(device.removeprefix("cuda:")) >= len(host.gpus):
            hint = "use `device = auto` or `cpu`, or describe the target machine with `--host FILE`"
            missing.append(
                Diagnostic("M069", f"`place({device})`: this host has {len(host.gpus)} GPUs", claim.span, hint=hint)
            )
        placed.append(Placement(claim.path, device, claim.rule, claim.span))
    if missing:
        raise HostLacks(*missing)
    return tuple(dict.fromkeys(placed))


def resolve_device(device: str, host: Host) -> str:
    """`auto` is the first GPU if there is one, else the CPU."""
    if device == "cuda":
        return "cuda:0"
    return ("cuda:0" if host.gpus else "cpu") if device == "auto" else device


def device_of(path: str, placements: Mapping[str, str]) -> str:
    """The device of the nearest placed ancestor of `path`."""
    while path not in placements:
        path = path.rpartition(".")[0]
    return placements[path]


def device_loads(
    captured: CapturedModel,
    placements: Mapping[str, str],
    kernels: Mapping[str, KernelSpec],
    rules: RuleSet,
    host: Host,
) -> tuple[DeviceLoad, ...]:
    """Bytes of weights per device. `kernels` maps the FQN of experts to the kernel that packs them (on the CPU)."""
    totals: dict[str, int] = {}
    for module in captured.modules:
        spec = kernels.get(module.fqn)
        for tensor in module.tensors:
            device, size = device_of(module.fqn, placements), tensor.bytes
            if spec is not None and len(tensor.shape) == 3:
                bits = BITS_PER_WEIGHT[spec.format_down if tensor.name.startswith("down") else spec.format_gate_up]
                device, size = "cpu", int(prod(tensor.shape) * bits / 8)
            totals[device] = totals.get(device, 0) + size
    return tuple(
        DeviceLoad(d, totals[d], _budget(d, rules, host)) for d in sorted(totals, key=lambda d: (d == "cpu", d))
    )


def _budget(device: str, rules: RuleSet, host: Host) -> int | None:
    asked = rules.plan.get(device)
    if isinstance(asked, int):
        return asked
    if device == "cpu":
        return int(host.memory * BUDGET_SHARE)
    number = int(device.partition(":")[2] or 0)
    return int(host.gpus[number].memory * BUDGET_SHARE) if number < len(host.gpus) else None


def over_budget(loads: Sequence[DeviceLoad]) -> tuple[Diagnostic, ...]:
    """One diagnostic per device that cannot hold what the plan puts there."""
    return tuple(
        Diagnostic(
            "M070",
            f"the plan puts {gib(load.weights)} of weights on `{load.device}`, its budget is {gib(load.budget)}",
            hint=f"place less there, choose a smaller format, or set `plan {{ {load.device} = SIZE }}`",
        )
        for load in loads
        if load.budget is not None and load.weights > load.budget
    )


def gib(size: int) -> str:
    """Bytes as a person reads them: `15.0 GiB`, `3.2 MiB`."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size} B"

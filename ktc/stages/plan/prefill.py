"""Where calls of routed experts with many tokens are computed: `place(cpu, prefill = D)` on experts of `cpu_moe`.

`place(stream = D)` on them is the same for calls of any size. `auto` is every GPU of the host, each with a share.
In: the claims, the program and the host. Out: for each experts module its devices, from how many tokens on, and the
memory that weights pass through. `stay_resident` then marks the layers whose weights a device has room for.
Refused: a GPU that the host does not have, weights that are cut for several NUMA nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.host import Host
from ktc.language.dsl.ruleset import RuleSet
from ktc.model.experts.stream_sizes import DEFAULT_BUFFER, ring_bytes
from ktc.model.kernels.kernel_spec import KernelSpec
from ktc.model.kernels.packed_size import packed_bytes
from ktc.model.targets import CpuMoe, Place
from ktc.model.targets.target import Prefill
from ktc.stages.plan.placement import require_gpu, resolve_device
from ktc.stages.plan.types import Claim, MemoryPlan

# A GPU on a bus of 55 GB/s takes the time of 16 AMX cores for 1,200 tokens of DeepSeek-V2-Lite (docs/benchmarks.md),
# and that of slower cores for fewer; `plan { layerwise_prefill = N }` says otherwise.
DEFAULT_TOKENS: Final = 1024


def asks_for_experts(claim: Claim, claims: Sequence[Claim]) -> bool:
    """Return whether a `place` with `prefill` or `stream` applies to experts that run on the CPU."""
    asked = isinstance(claim.target, Place) and (claim.target.prefill or claim.target.stream) is not None
    return asked and any(isinstance(other.target, CpuMoe) and other.path == claim.path for other in claims)


def plan_prefill(claims: Sequence[Claim], rules: RuleSet, host: Host) -> dict[str, Prefill]:
    """By the experts' FQN. Raises HostLacks (M069) and InputRefused (M078)."""
    found: dict[str, Prefill] = {}
    problems: dict[str, Diagnostic] = {}
    for claim in claims:
        if not isinstance(claim.target, Place) or not asks_for_experts(claim, claims):
            continue
        setting = "prefill" if claim.target.prefill else "stream"
        device = str(claim.target.prefill or claim.target.stream)
        devices = _devices(device, host)
        if devices == ("cpu",):
            continue
        for each in devices:
            require_gpu(each, setting, claim, host)
        if why := _unsuited(claim, claims, host):
            message = f"`place({setting} = {device})`: {why}"
            problems[why] = Diagnostic("M078", message, claim.span, hint="see `ktc explain M078`")
        tokens = rules.plan.get("layerwise_prefill")
        least = tokens if isinstance(tokens, int) else DEFAULT_TOKENS
        found[claim.path] = Prefill(devices, least if claim.target.prefill else 1, stream_buffer(rules))
    if problems:
        raise InputRefused(*problems.values())
    return found


def stream_buffer(rules: RuleSet) -> int:
    """Return the bytes that streamed weights pass through on each device."""
    asked = rules.plan.get("stream_buffer")
    return asked if isinstance(asked, int) else DEFAULT_BUFFER


def _devices(device: str, host: Host) -> tuple[str, ...]:
    if device == "auto" and host.gpus:
        return tuple(f"cuda:{number}" for number in range(len(host.gpus)))
    return (resolve_device(device, host),)


def _unsuited(claim: Claim, claims: Sequence[Claim], host: Host) -> str:
    """Return why the weights cannot be multiplied on another device, "" if they can."""
    experts = next(c.target for c in claims if isinstance(c.target, CpuMoe) and c.path == claim.path)
    if host.numa > 1 and experts.numa == "shard":
        return f"weights that are cut for several NUMA nodes cannot be sent; write `{CpuMoe.name}(numa = none)`"
    return ""


def expert_rings(prefills: Mapping[str, Prefill], specs: Mapping[str, KernelSpec]) -> set[tuple[str, int]]:
    """Return the devices of streamed experts with the sizes of their rings, which hold a few experts at least."""
    return {
        (device, ring_bytes(prefill.buffer, packed_bytes(specs[path]) // (specs[path].num_experts or 1)))
        for path, prefill in prefills.items()
        if path in specs and not prefill.resident
        for device in prefill.devices
    }


# Resident layers -----------------------------------------------------------------------------------------------------
def resident_bytes(prefills: Mapping[str, Prefill], specs: Mapping[str, KernelSpec]) -> dict[str, int]:
    """Count by device the experts that stay there, as they are stored."""
    found: dict[str, int] = {}
    for path, prefill in prefills.items():
        for device in prefill.devices if prefill.resident and path in specs else ():
            found[device] = found.get(device, 0) + _share(specs[path], prefill)
    return found


def stay_resident(
    prefills: Mapping[str, Prefill], specs: Mapping[str, KernelSpec], memory: MemoryPlan, rules: RuleSet, mode: str
) -> dict[str, Prefill]:
    """Mark as many layers as the devices' budgets hold, at even distances; a device without a budget takes none.

    `memory` is the plan without them. Room is kept for its use in this `mode` that needs least.
    """
    streamed = {path: prefill for path, prefill in prefills.items() if path in specs}
    devices = {device for prefill in streamed.values() for device in prefill.devices}
    budgets = {device: asked for device in devices if isinstance(asked := rules.plan.get(device), int)}
    if not streamed or budgets.keys() != devices:
        return dict(prefills)
    needs = ([use.needs for use in memory.workloads if use.name.startswith(mode)] or [memory.workloads[-1].needs])[-1]
    room = {device: budget - sum(needs.get(device, {}).values()) for device, budget in budgets.items()}
    largest = {d: max(_share(specs[path], p) for path, p in streamed.items() if d in p.devices) for d in devices}
    count = min(max(0, room[device]) // largest[device] for device in devices)
    paths = list(streamed)
    count = min(count, len(paths))
    chosen = {paths[(2 * number + 1) * len(paths) // (2 * count)] for number in range(count)}
    return {path: replace(prefill, resident=path in chosen) for path, prefill in prefills.items()}


def _share(spec: KernelSpec, prefill: Prefill) -> int:
    return -(-packed_bytes(spec) // len(prefill.devices))

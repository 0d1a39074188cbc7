"""Where calls of routed experts with many tokens are computed: `place(cpu, prefill = D)` on experts of `cpu_moe`.

In: the claims, the program and the host. Out: for each experts module its device and from how many tokens on.
Refused: a GPU that the host has not, weights that are cut for several NUMA nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.dsl.ruleset import RuleSet
from ktc.host import Host
from ktc.plan.placement import require_gpu, resolve_device
from ktc.plan.types import Claim
from ktc.targets import CpuMoe, Place
from ktc.targets.target import Prefill

# A GPU on a bus of 55 GB/s takes the time of 16 AMX cores for 1,200 tokens of DeepSeek-V2-Lite (docs/benchmarks.md),
# and that of slower cores for fewer; `plan { layerwise_prefill = N }` says otherwise.
DEFAULT_TOKENS: Final = 1024


def asks_for_experts(claim: Claim, claims: Sequence[Claim]) -> bool:
    """Return whether a `place` with `prefill` applies to experts that run on the CPU."""
    asked = isinstance(claim.target, Place) and claim.target.prefill is not None
    return asked and any(isinstance(other.target, CpuMoe) and other.path == claim.path for other in claims)


def plan_prefill(claims: Sequence[Claim], rules: RuleSet, host: Host) -> dict[str, Prefill]:
    """By the experts' FQN. Raises HostLacks (M069) and InputRefused (M078)."""
    found: dict[str, Prefill] = {}
    problems: dict[str, Diagnostic] = {}
    for claim in claims:
        if not isinstance(claim.target, Place) or not asks_for_experts(claim, claims):
            continue
        device = resolve_device(str(claim.target.prefill), host)
        if device == "cpu":
            continue
        require_gpu(device, "prefill", claim, host)
        if why := _unsuited(claim, claims, host):
            message = f"`place(prefill = {device})`: {why}"
            problems[why] = Diagnostic("M078", message, claim.span, hint="see `ktc explain M078`")
        tokens = rules.plan.get("layerwise_prefill")
        found[claim.path] = Prefill(device, tokens if isinstance(tokens, int) else DEFAULT_TOKENS)
    if problems:
        raise InputRefused(*problems.values())
    return found


def _unsuited(claim: Claim, claims: Sequence[Claim], host: Host) -> str:
    """Return why the weights cannot be multiplied on another device, "" if they can."""
    experts = next(c.target for c in claims if isinstance(c.target, CpuMoe) and c.path == claim.path)
    if host.numa > 1 and experts.numa == "shard":
        return f"weights that are cut for several NUMA nodes cannot be sent; write `{CpuMoe.name}(numa = none)`"
    return ""

"""Where calls of routed experts with many tokens are computed: `place(cpu, prefill = D)` on experts of `cpu_moe`.

`place(stream = D)` on them is the same for calls of any size. `auto` is every GPU of the host, each with a share.
The weights of `gpu_moe` stay on the GPU of their block, which computes all calls.
In: the claims, the program and the host. Out: for each experts module its devices, from how many tokens on, and the
memory that weights pass through. `kept.py` decides which weights stay there.
Refused: a GPU that the host does not have, weights that are cut for several NUMA nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.host import Host
from ktc.language.dsl.ruleset import RuleSet
from ktc.model.experts.streamed.stream_sizes import DEFAULT_BUFFER
from ktc.model.targets.target import Prefill, Target
from ktc.stages.plan.draft import PlanDraft
from ktc.stages.plan.placement import require_gpu, resolve_device

# A GPU on a bus of 55 GB/s takes the time of 16 AMX cores for 1,200 tokens of DeepSeek-V2-Lite (docs/benchmarks.md),
# and that of slower cores for fewer; `plan { layerwise_prefill = N }` says otherwise.
DEFAULT_TOKENS: Final = 1024


def send_experts(draft: PlanDraft) -> PlanDraft:
    """Decide where each experts module computes many tokens. Raises HostLacks (M069) and InputRefused (M078)."""
    prefills, problems = dict[str, Prefill](), dict[str, Diagnostic]()
    on_host = {claim.path: claim.target for claim in draft.claims if claim.target.required_device == "cpu"}
    for claim in draft.claims:
        place = claim.target.placement
        experts = on_host.get(claim.path)
        if place is None or not (place.prefill or place.stream):
            continue
        setting, device = ("prefill", place.prefill) if place.prefill else ("stream", str(place.stream))
        devices = _devices(str(device), draft.host)
        if experts is None and setting == "stream":
            continue  # linear layers are streamed, which `streams.py` decides
        if experts is not None and devices == ("cpu",) and not experts.stays_on_gpu:
            continue
        for name in devices:
            require_gpu(name, setting, claim, draft.host)
        if why := _unsuited(experts, draft.host, is_placed=True):
            message = f"`place({setting} = {device})`: {why}"
            problems[why] = Diagnostic("M078", message, claim.span, hint="see `ktc explain M078`")
        tokens = draft.rules.plan.get("layerwise_prefill")
        least = tokens if isinstance(tokens, int) else DEFAULT_TOKENS
        prefills[claim.path] = Prefill(devices, least if place.prefill else 1, stream_buffer(draft.rules))
    if problems:
        raise InputRefused(*problems.values())
    return with_prefills(draft, {**_chosen(draft, on_host), **prefills, **_staying(draft)})


def _staying(draft: PlanDraft) -> dict[str, Prefill]:
    """Return the prefills of `gpu_moe`. Raises HostLacks (M069) without a GPU, and InputRefused (M078)."""
    prefills = dict[str, Prefill]()
    for plan in draft.nodes:
        if not plan.target.stays_on_gpu:
            continue
        device = plan.device if plan.device.startswith("cuda") else "cuda:0"
        require_gpu(device, "", plan.claim, draft.host)
        if why := _unsuited(plan.target, draft.host):
            raise InputRefused(Diagnostic("M078", f"`gpu_moe`: {why}", plan.claim.span, hint="see `ktc explain M078`"))
        prefills[plan.claim.path] = Prefill((device,), 1, stream_buffer(draft.rules), resident=True)
    return prefills


def _chosen(draft: PlanDraft, on_host: Mapping[str, Target]) -> dict[str, Prefill]:
    """Return the prefills that are chosen, for experts on the host that no rule places."""
    choices = draft.request.choices
    if choices is None or not choices.sent:
        return {}
    buffer = stream_buffer(draft.rules)
    placed = {claim.path for claim in draft.claims if claim.target.placement is not None}
    return {
        path: Prefill(choices.sent, 1 if path in choices.resident else choices.least, buffer, path in choices.resident)
        for path, target in on_host.items()
        if path not in placed and not target.stays_on_gpu and not _unsuited(target, draft.host)
    }


def with_prefills(draft: PlanDraft, prefills: Mapping[str, Prefill]) -> PlanDraft:
    """Return the draft with the prefills of its experts."""
    nodes = (
        replace(plan, prefill=prefills.get(plan.claim.path)) if plan.target.takes_experts else plan
        for plan in draft.nodes
    )
    return replace(draft, nodes=tuple(nodes))


def stream_buffer(rules: RuleSet) -> int:
    """Return the bytes that streamed weights pass through on each device."""
    size = rules.plan.get("stream_buffer")
    return size if isinstance(size, int) else DEFAULT_BUFFER


def _devices(device: str, host: Host) -> tuple[str, ...]:
    if device == "auto" and host.gpus:
        return tuple(f"cuda:{number}" for number in range(len(host.gpus)))
    return (resolve_device(device, host),)


def _unsuited(experts: Target | None, host: Host, *, is_placed: bool = False) -> str:
    """Return why the weights cannot be multiplied on another device, "" if they can."""
    if experts is not None and experts.stays_on_gpu and is_placed:
        return "the weights of `gpu_moe` stay on the GPU; leave `prefill` and `stream` out"
    if experts is None:
        return "no rule runs routed experts there on the CPU, whose weights could be sent"
    if host.numa > 1 and experts.settings["numa"] == "shard":
        return "weights that are cut for several NUMA nodes cannot be sent; leave `numa = shard` out"
    return ""

"""Where calls of routed experts with many tokens are computed: `place(cpu, prefill = D)` on experts of `cpu_moe`.

`place(stream = D)` on them is the same for calls of any size. `auto` is every GPU of the host, each with a share.
The weights of `gpu_moe` stay on the GPU of their block, which computes all calls.
In: the claims, the program and the host. Out: for each experts module its devices, from how many tokens on, and the
memory that weights pass through. `keep_resident` then uses the room that a budget leaves: for single experts of all
layers where decoding steps are CUDA graphs, for whole layers otherwise, and in a program that serves.
Refused: a GPU that the host does not have, weights that are cut for several NUMA nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.formats import FORMATS
from ktc.foundation.host import Host
from ktc.language.dsl.ruleset import RuleSet
from ktc.model.experts.panel_codes import addressed_codes_of
from ktc.model.experts.stream_sizes import DEFAULT_BUFFER
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.model.targets.target import Prefill, Target
from ktc.stages.plan.decode_steps import gpu_of_graphs
from ktc.stages.plan.draft import PlanDraft
from ktc.stages.plan.memory import count_memory
from ktc.stages.plan.nodes import group_sites
from ktc.stages.plan.placement import require_gpu, resolve_device
from ktc.stages.plan.streamed_bytes import expert_bytes, sent_experts, share_bytes

# A GPU on a bus of 55 GB/s takes the time of 16 AMX cores for 1,200 tokens of DeepSeek-V2-Lite (docs/benchmarks.md),
# and that of slower cores for fewer; `plan { layerwise_prefill = N }` says otherwise.
DEFAULT_TOKENS: Final = 1024
SPLIT: Final = "experts_split"  # of the `plan` block


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
    return _with(draft, {**_chosen(draft, on_host), **prefills, **_staying(draft)})


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


def _with(draft: PlanDraft, prefills: Mapping[str, Prefill]) -> PlanDraft:
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


def keep_resident(draft: PlanDraft) -> PlanDraft:
    """Keep as many experts on their devices as the budgets hold, and count the memory again.

    They are single experts where decoding steps can read them, otherwise whole layers, at even distances. A program
    that serves keeps whole layers if one fits, since running batches have more rows than those steps. A device without
    a budget keeps none, and choices keep what they say. Room is left for that use in the program's mode that needs
    least.
    """
    everywhere, memory = sent_experts(draft), draft.memory
    sent = {path: one for path, one in everywhere.items() if not one[0].resident}
    if not sent or memory is None:
        return draft
    single, prefills = _reads_single_experts(draft, sent), {path: prefill for path, (prefill, _) in everywhere.items()}
    devices = {device for prefill, _ in sent.values() for device in prefill.devices}
    budgets = {device: size for device in devices if isinstance(size := draft.rules.plan.get(device), int)}
    if draft.request.choices is not None or budgets.keys() != devices:
        return _with_prefills(draft, prefills | _split(draft, sent, 0)) if single else draft
    uses = [use for use in memory.workloads if use.name.startswith(draft.mode)] or [*memory.workloads]
    needs = uses[-1].needs
    room = {device: max(0, budget - sum(needs.get(device, {}).values())) for device, budget in budgets.items()}
    largest = {d: max(share_bytes(spec, p) for p, spec in sent.values() if d in p.devices) for d in devices}
    paths = list(sent)
    count = min(len(paths), *(room[device] // largest[device] for device in devices))
    if single and count < len(paths) and (not count or draft.rules.plan.get("mode") != "serve"):
        return _with_prefills(draft, prefills | _split(draft, sent, sum(room.values())))
    if not count:
        return draft
    chosen = {paths[(2 * number + 1) * len(paths) // (2 * count)] for number in range(count)}
    whole = {path: replace(prefills[path], resident=True) for path in chosen}
    others = {path: one for path, one in sent.items() if path not in chosen}
    return _with_prefills(draft, prefills | whole | (_split(draft, others, 0) if single and others else {}))


def _with_prefills(draft: PlanDraft, prefills: Mapping[str, Prefill]) -> PlanDraft:
    return count_memory(group_sites(_with(draft, prefills)))


_Sent = Mapping[str, tuple[Prefill, FusedMoeSpec]]


def _reads_single_experts(draft: PlanDraft, sent: _Sent) -> bool:
    """Return whether steps read single experts: as CUDA graphs of the experts' GPU, which multiplies by address."""
    formats = all(
        addressed_codes_of(FORMATS[stored], spec.group_size) is not None
        for _, spec in sent.values()
        for stored in spec.formats
    )
    is_there = {prefill.devices for prefill, _ in sent.values()} == {(gpu_of_graphs(draft),)}
    few = all(prefill.tokens > 1 for prefill, _ in sent.values())  # otherwise all calls go there
    return draft.mode != "train" and formats and few and is_there


def _split(draft: PlanDraft, sent: _Sent, room: int) -> dict[str, Prefill]:
    """Return prefills whose layers share places for as many single experts as there is room for."""
    device = next(iter(sent.values()))[0].devices[0]
    places = room // max(expert_bytes(spec) for _, spec in sent.values())
    rates = draft.host.rates.gpus[int(device.partition(":")[2] or 0)]
    bus, cpu = rates.bus_beside_cpu.median, rates.cpu_beside_bus.median
    fixed = draft.rules.plan.get(SPLIT) == "fixed"
    prefills = dict[str, Prefill]()
    for number, (path, (prefill, _)) in enumerate(sent.items()):
        kept = places * (number + 1) // len(sent) - places * number // len(sent)
        prefills[path] = replace(prefill, kept=kept, share=round(bus / (bus + cpu), 2), fixed_split=fixed)
    return prefills

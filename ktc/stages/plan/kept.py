"""The experts in host memory that stay on the GPU that many tokens go to: whole layers, or single experts.

In: a draft with counted memory, whose experts have their devices. Out: the same with what the budget of a GPU, or the
planner's choice, has room for. Single experts of any layer have places where decoding steps are CUDA graphs; whole
layers stay where steps are eager, in training, if all experts fit, and with `mode = serve` if one layer does.
A budget that leaves no room for one expert is a warning (M098).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from ktc.diagnostics import Diagnostic
from ktc.foundation.formats import FORMATS
from ktc.model.experts.layouts.panel_codes import addressed_codes_of
from ktc.model.experts.streamed.stream_sizes import TIGHT_BUFFER
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.model.targets.target import Prefill
from ktc.stages.plan.decode_steps import gpu_of_graphs
from ktc.stages.plan.divided import reads_of, with_division
from ktc.stages.plan.draft import PlanDraft
from ktc.stages.plan.host_table import host_table
from ktc.stages.plan.memory import count_memory
from ktc.stages.plan.nodes import group_sites
from ktc.stages.plan.placement import budget_of, gib
from ktc.stages.plan.prefill import with_prefills
from ktc.stages.plan.settings import span_of
from ktc.stages.plan.streamed_bytes import expert_bytes, sent_experts, share_bytes
from ktc.stages.plan.types import Plan, Reason, Workload

SPLIT: Final = "experts_split"  # of the `plan` block
DIVIDED: Final = "divided_prompts"
_ROWS: Final = "the table stays in host memory, so that more experts have places"
_CONTEXT: Final = 512 << 20  # bytes of CUDA's context, and of the allocator's gaps
_SMALL: Final = 1 << 30  # budgets up to this one leave nothing to it
_STEP: Final = 64 << 20  # bytes, in which a message names budgets
_Sent = Mapping[str, tuple[Prefill, FusedMoeSpec]]


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
    devices, choices = {device for prefill, _ in sent.values() for device in prefill.devices}, draft.request.choices
    budgets = {device: size for device in devices if isinstance(size := draft.rules.plan.get(device), int)}
    if choices is not None or budgets.keys() != devices:
        if choices is None or not choices.keeps or not single:
            return _keeping(draft, sent, 0) if single else draft
        return _keeping(*_with_places(draft, sent, devices))
    use, room = _least(draft), {device: _room(draft, (device,)) for device in budgets}
    largest = {d: max(share_bytes(spec, p) for p, spec in sent.values() if d in p.devices) for d in devices}
    paths = list(sent)
    count = min(len(paths), *(room[device] // largest[device] for device in devices))
    if single and count < len(paths) and (not count or draft.rules.plan.get("mode") != "serve"):
        roomy, others, places = _with_places(draft, sent, devices)
        kept = _keeping(roomy, others, places)
        return kept if places else kept.with_warnings(*(_no_place(draft, use, sent, *one) for one in budgets.items()))
    if not count:
        return draft
    chosen = {paths[(2 * number + 1) * len(paths) // (2 * count)] for number in range(count)}
    whole = {path: replace(prefills[path], resident=True) for path in chosen}
    others = {path: one for path, one in sent.items() if path not in chosen}
    return _counted(draft, prefills | whole | (_split(draft, others, 0) if single and others else {}))


def _with_places(draft: PlanDraft, sent: _Sent, devices: Iterable[str]) -> tuple[PlanDraft, _Sent, int]:
    """Return the draft and its sent experts with room for places, and their number. Without one they are as given."""
    roomy, others = _with_room(draft, sent, devices)
    places = _room(roomy, devices) // _place_bytes(others)
    return (roomy, others, places) if places else (draft, sent, 0)


def _with_room(draft: PlanDraft, sent: _Sent, devices: Iterable[str]) -> tuple[PlanDraft, _Sent]:
    """Return the draft and its sent experts with more room for places, where not all experts have one.

    The table of embeddings stays in host memory, of which a step reads a row. The ring is small: a prompt waits for
    the bus in any case, and each place more saves a step's reads. The program's own `stream_buffer` stays.
    """
    total = sum(spec.num_experts or 1 for _, spec in sent.values()) * _place_bytes(sent)
    if _room(draft, devices) >= total:
        return draft, sent
    table = host_table(draft)
    if table is not None:
        reason = Reason(table.fqn, f"{table.device} reads the rows of tokens: {_ROWS}")
        draft = count_memory(replace(draft, table=table).with_reasons(reason))
    if "stream_buffer" in draft.rules.plan or _room(draft, devices) >= total:
        return draft, sent
    small = {path: (replace(prefill, buffer=TIGHT_BUFFER), spec) for path, (prefill, spec) in sent.items()}
    prefills = {path: prefill for path, (prefill, _) in {**sent_experts(draft), **small}.items()}
    return _counted(draft, prefills), small


def _least(draft: PlanDraft) -> Workload:
    """Return the use of the program's mode that needs least memory, the last of them."""
    assert draft.memory is not None, "a pass before counts the memory"
    uses = draft.memory.workloads
    return ([use for use in uses if use.name.startswith(draft.mode)] or [*uses])[-1]


def _room(draft: PlanDraft, devices: Iterable[str]) -> int:
    """Return the bytes that the budgets of devices leave in the use that needs least."""
    needs = _least(draft).needs
    budgets = {device: budget_of(device, draft.rules, draft.host) or 0 for device in devices}
    if not draft.request.choices:  # a budget that the program names is for the whole process
        budgets = {device: budget - _left_free(budget) for device, budget in budgets.items()}
    return sum(max(0, budget - sum(needs.get(device, {}).values())) for device, budget in budgets.items())


def _left_free(budget: int) -> int:
    """Return the bytes of a named budget that are left to CUDA's context."""
    return min(_CONTEXT, max(0, budget - _SMALL))


def _counted(draft: PlanDraft, prefills: Mapping[str, Prefill]) -> PlanDraft:
    return count_memory(group_sites(with_prefills(draft, prefills)))


def _keeping(draft: PlanDraft, sent: _Sent, places: int) -> PlanDraft:
    """Return the draft whose layers share places for that many single experts, all of them at most."""
    total = sum(spec.num_experts or 1 for _, spec in sent.values())
    places, device = min(places, total), next(iter(sent.values()))[0].devices[0]
    prefills = {path: prefill for path, (prefill, _) in sent_experts(draft).items()}
    kept = _counted(draft, prefills | _split(draft, sent, places))
    if not places:
        return kept
    nbytes = gib(places * _place_bytes(sent))
    text = f"{device} keeps {places:,} of {total:,} routed experts for decoding steps ({nbytes})"
    return kept.with_reasons(Reason("model", text))


def _no_place(draft: PlanDraft, use: Workload, sent: _Sent, device: str, budget: int) -> Diagnostic:
    """Return the warning (M098) that a budget has no room for one expert beside what the plan needs there."""
    needed, one = sum(use.needs.get(device, {}).values()), _place_bytes(sent)
    shape = f"{use.name} at batch {use.batch} and length {use.length:,}"
    message = f"the budget of `{device}` has room for no expert: it is {gib(budget)}, and {shape} needs {gib(needed)}"
    if _left_free(budget):
        message += f", CUDA's context {gib(_left_free(budget))}"
    least = needed + one
    enough = -(-(least if least <= _SMALL else least + _CONTEXT) // _STEP) * _STEP
    buffer = next(iter(sent.values()))[0].buffer
    hint = f"`{device} = {enough >> 20}MiB` is enough for the first, each takes {gib(one)}"
    hint += f"; a smaller `stream_buffer` than {gib(buffer)} leaves room too"
    return Diagnostic("M098", message, span_of(draft.rules, device), hint=hint, severity="warning")


def places_of(plan: Plan) -> tuple[int, int, float] | None:
    """Return the places of a plan, the experts that share them, and the part of the others that the bus reads at first.

    None where decoding steps split no experts between a GPU and the CPU.
    """
    split = [
        (action.prefill, action.kernel.num_experts or 1, len(rewrite.sites))
        for rewrite in plan.rewrites
        for action in rewrite.actions
        if action.prefill is not None and action.prefill.kept is not None and isinstance(action.kernel, FusedMoeSpec)
    ]
    if not split:
        return None
    kept = sum((prefill.kept or 0) * sites for prefill, _, sites in split)
    return kept, sum(experts * sites for _, experts, sites in split), split[0][0].share


def _place_bytes(sent: _Sent) -> int:
    """Return the bytes of a place: those of the largest expert."""
    return max(expert_bytes(spec) for _, spec in sent.values())


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


def _split(draft: PlanDraft, sent: _Sent, places: int) -> dict[str, Prefill]:
    """Return prefills whose layers share places for that many single experts."""
    device = next(iter(sent.values()))[0].devices[0]
    rates = draft.host.rates.gpus[int(device.partition(":")[2] or 0)]
    bus, cpu = rates.bus_beside_cpu.median, rates.cpu_beside_bus.median
    fixed = draft.rules.plan.get(SPLIT) == "fixed"
    prefills = dict[str, Prefill]()
    for number, (path, (prefill, spec)) in enumerate(sent.items()):
        kept = places * (number + 1) // len(sent) - places * number // len(sent)
        share = round(bus / (bus + cpu * reads_of(spec)), 2)
        split = replace(prefill, kept=kept, share=share, fixed_split=fixed)
        divided = draft.rules.plan.get(DIVIDED) == "auto"
        prefills[path] = with_division(split, spec, draft.host.rates) if divided else split
    return prefills

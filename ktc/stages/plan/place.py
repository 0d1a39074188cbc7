"""Placement: the device of every module that a rule places.

Experts are on the device of their kernel. Modules that no rule places go to `plan.unplaced`, to the device that is
chosen for them, or to the host's memory.
"""

from __future__ import annotations

from dataclasses import replace

from ktc.diagnostics import Diagnostic, HostLacks, InputRefused, Span
from ktc.foundation.module_paths import from_inside
from ktc.model.graph.typed import named_modules
from ktc.stages.plan.draft import PlanDraft
from ktc.stages.plan.placement import require_gpu, resolve_device
from ktc.stages.plan.types import NO_CHOICES, Placement


def place(draft: PlanDraft) -> PlanDraft:
    """Decide every explicit placement, `auto` resolved, the root first.

    Raise HostLacks (M069) for a missing GPU, InputRefused (M080) for settings that contradict each other.
    """
    chosen = (draft.request.choices or NO_CHOICES).devices
    unplaced = draft.rules.plan.get("unplaced")
    children = {name for name, _ in named_modules(draft.captured.model) if "." not in name and name}
    if children <= {claim.path for claim in draft.claims if claim.target.placement is not None}:
        chosen = NO_CHOICES.devices  # rules place the whole model
    default = resolve_device(str(unplaced or chosen.get("", "cpu")), draft.host)
    placed = [Placement("", default, "", None)]
    on_kernels_device = {claim.path for claim in draft.claims if claim.target.required_device}
    missing, contradictions = list[Diagnostic](), dict[Span, Diagnostic]()
    for claim in draft.claims:
        target = claim.target.placement
        if target is not None and (why := target.contradiction):
            contradictions[claim.span] = Diagnostic("M080", f"`place` {why}", claim.span, hint="see `ktc explain M080`")
        if target is None or claim.path in on_kernels_device:
            continue
        device = resolve_device(target.computes_on, draft.host)
        try:
            require_gpu(device, "", claim, draft.host)
        except HostLacks as error:
            missing += error.diagnostics
        placed.append(Placement(claim.path, device, claim.rule, claim.span))
    if contradictions:
        raise InputRefused(*contradictions.values())
    if missing:
        raise HostLacks(*missing)
    if not unplaced:
        by_rule = {placement.fqn for placement in placed if placement.rule}
        free = {fqn: device for fqn, device in chosen.items() if fqn and not by_rule & {*from_inside(fqn)}}
        placed += [Placement(fqn, device, "", None) for fqn, device in free.items()]
    return replace(draft, placements=tuple(dict.fromkeys(placed)))

"""The bytes that streamed weights take on their devices."""

from __future__ import annotations

from ktc.model.experts.streamed.stream_sizes import ring_bytes
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.model.kernels.packed_size import packed_bytes
from ktc.model.targets.target import Prefill
from ktc.stages.plan.draft import PlanDraft


def streamed_bytes(draft: PlanDraft) -> dict[str, int]:
    """Count by device what streamed weights take: experts that stay there as stored, single ones too, and rings.

    A ring holds a few experts at least. All layers that stream to a device through buffers of one size share one.
    """
    nbytes: dict[str, int] = {}
    rings = {(linear.device, max(linear.buffer, linear.nbytes)) for linear in draft.streams}
    for prefill, spec in sent_experts(draft).values():
        for device in prefill.devices:
            if prefill.resident:
                nbytes[device] = nbytes.get(device, 0) + share_bytes(spec, prefill)
            else:
                rings.add((device, ring_bytes(prefill.buffer, expert_bytes(spec))))
                nbytes[device] = nbytes.get(device, 0) + (prefill.kept or 0) * expert_bytes(spec)
    for device, size in rings:
        nbytes[device] = nbytes.get(device, 0) + size
    return nbytes


def sent_experts(draft: PlanDraft) -> dict[str, tuple[Prefill, FusedMoeSpec]]:
    """Return the experts whose weights are sent to devices, by FQN."""
    return {
        plan.claim.path: (plan.prefill, plan.spec)
        for plan in draft.nodes
        if plan.prefill is not None and isinstance(plan.spec, FusedMoeSpec)
    }


def expert_bytes(spec: FusedMoeSpec) -> int:
    """Return the bytes of one packed expert."""
    return packed_bytes(spec) // (spec.num_experts or 1)


def share_bytes(spec: FusedMoeSpec, prefill: Prefill) -> int:
    """Return the bytes of a layer's experts on each of its devices."""
    return -(-packed_bytes(spec) // len(prefill.devices))

"""The nodes of a plan: each claim's device, weights and kernel, and the sites that receive the same rewrite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.graph import ops
from ktc.model.graph.typed import nodes_of
from ktc.model.kernels.spec import Spec
from ktc.model.targets.node_plan import Claim, NodePlan
from ktc.model.targets.settings import Facet
from ktc.model.targets.target import NodeAction
from ktc.stages.capture import BlockGraph, BlockSite
from ktc.stages.plan.collapse import collapse
from ktc.stages.plan.draft import PlanDraft
from ktc.stages.plan.left_out import ON_GPU
from ktc.stages.plan.placement import device_of
from ktc.stages.plan.types import BlockRewrite, Plan, UncapturedLinear

_Place = tuple[str, str, str]


def plan_nodes(draft: PlanDraft) -> PlanDraft:
    """Plan each node that is claimed; its target chooses the kernel. Raises as `Target.choose` does."""
    devices = draft.devices
    claims = [claim for claim in draft.claims if claim.facet != "place" and not claim.target.keeps]
    together: dict[_Place, dict[Facet, Claim]] = {}
    for claim in claims:
        together.setdefault(_place(claim), {})[claim.facet] = claim
    nodes = tuple(_planned(draft, claim, together[_place(claim)], devices) for claim in claims)
    outside = (plan for plan in nodes if plan.target.replaces_modules and not plan.claim.node)
    uncaptured = tuple(UncapturedLinear(plan.action, plan.device) for plan in outside)
    return replace(draft, nodes=nodes, uncaptured=uncaptured)


def _place(claim: Claim) -> _Place:
    return claim.site, claim.node, claim.path


def _planned(
    draft: PlanDraft, claim: Claim, together: Mapping[Facet, Claim], devices: Mapping[str, str]
) -> NodePlan:  # fmt: skip
    siblings: dict[Facet, Claim] = {facet: other for facet, other in together.items() if other is not claim}
    plan = NodePlan(claim, siblings, device_of(claim.path, devices), weights=draft.treatment(claim.path))
    if not claim.node and not claim.target.replaces_modules:
        return plan
    return replace(plan, spec=claim.target.choose(plan, draft.captured_node(claim)))


def group_sites(draft: PlanDraft) -> PlanDraft:
    """Make one rewrite of the sites of a block with the same actions on the same devices."""
    by_site, devices = draft.nodes_by_site(), draft.devices
    groups: dict[object, tuple[list[BlockSite], tuple[NodeAction, ...]]] = {}
    for site in draft.captured.sites:
        if site.fqn not in by_site:
            continue
        actions = tuple(plan.action for plan in by_site[site.fqn])
        done = tuple((a.node, a.target, a.kernel, a.prefill, a.weights) for a in actions)
        group = groups.setdefault((site.block, device_of(site.fqn, devices), done), ([], actions))
        group[0].append(site)
    counts: dict[str, int] = {}
    rewrites: list[BlockRewrite] = []
    for sites, actions in groups.values():
        block = sites[0].block
        counts[block] = counts.get(block, 0) + 1
        key = block if counts[block] == 1 else f"{block}_{counts[block]}"
        elsewhere = {a.node: device for a in actions if (device := a.required_device)}
        rewrites.append(BlockRewrite(key, block, tuple(sites), actions, device_of(sites[0].fqn, devices), elsewhere))
    return replace(draft, rewrites=tuple(rewrites))


def kernel_origins(plan: Plan) -> dict[Spec, str]:
    """Return the location in the rules that requested each kernel."""
    actions = [action for rewrite in plan.rewrites for action in rewrite.actions]
    actions += [linear.action for linear in plan.uncaptured]
    return {action.kernel: f"{action.rule} ({action.span})" for action in actions if action.kernel is not None}


# What is not rewritten -----------------------------------------------------------------------------------------------
def require_rewrites(draft: PlanDraft) -> PlanDraft:
    """Raise InputRefused (M071) for a program that rewrites nothing, unless it leaves blocks on a GPU to PyTorch."""
    if draft.rewrites or draft.uncaptured or draft.trained_modules or ON_GPU in draft.left.values():
        return draft
    captured, matches = draft.captured, draft.request.matches
    nearest = max(matches.near_misses, key=lambda miss: miss.matched, default=None)
    opaque = next((block for block in captured.blocks if block.graph is None), None)
    left = draft.warnings[len(matches.warnings) :]
    if left:
        hint = left[0].message
    elif nearest is not None and any(map(_has_experts, captured.blocks)):
        hint = f"closest: {nearest}"
    elif opaque is not None:
        hint = f"`{opaque.class_name}` {opaque.unchanged}"
    else:
        hint = "look at its blocks with `ktc graph MODEL`"
    message = f"no rule rewrites anything in this `{captured.source.config.model_type}` model"
    raise InputRefused(Diagnostic("M071", message, hint=hint))


def _has_experts(block: BlockGraph) -> bool:
    return block.graph is not None and any(ops.operator(node) == "experts" for node in nodes_of(block.graph))


def warn_of_unchanged(draft: PlanDraft) -> PlanDraft:
    """Warn of blocks that could not be captured, and of routed experts that no rule rewrites (M073).

    Sites that a claim was left out for have a warning already.
    """
    return draft.with_warnings(*_unchanged(draft))


def _unchanged(draft: PlanDraft) -> Iterator[Diagnostic]:
    experts = {plan.claim.site for plan in draft.nodes if plan.target.module and plan.target.takes_experts}
    for block in draft.captured.blocks:
        sites = [site.fqn for site in draft.captured.sites_of(block.key) if site.fqn not in {*draft.left, *experts}]
        if block.graph is None:
            why = f"`{block.class_name}`{':' * bool(block.refuted)} {block.unchanged}"
        elif _has_experts(block):
            why = f"no rule rewrites the routed experts of `{block.class_name}`"
        else:
            continue
        if sites:
            message = f"{collapse(sites)} stays as it is: {why}"
            hint = (
                "docs/details/proofs.md lists what is compared"
                if block.refuted
                else "`ktc graph MODEL` shows its blocks"
            )
            yield Diagnostic(block.refuted or "M073", message, hint=hint, severity="warning")

"""Why the plan is as it is: one sentence per rewrite, placement and untouched block. Layers are written as ranges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ktc.model.targets.node_plan import NodePlan
from ktc.stages.plan.collapse import collapse, split_at_number
from ktc.stages.plan.draft import PlanDraft
from ktc.stages.plan.types import BlockRewrite, LoraPlan, Placement, Reason


def explain(draft: PlanDraft) -> PlanDraft:
    """Explain rewrites, placements, then unchanged modules, each in the order of the model."""
    by_site = draft.nodes_by_site()
    nodes = {rewrite.key: by_site[rewrite.sites[0].fqn] for rewrite in draft.rewrites}
    reasons = (
        *(reason for rewrite in draft.rewrites for reason in _of_rewrite(draft, rewrite, nodes[rewrite.key])),
        *_of_recurrences(draft),
        *(_of_uncaptured(draft, plan) for plan in draft.nodes if plan.target.replaces_modules and not plan.claim.node),
        *_of_placements(draft.placements),
        *_untouched(draft),
        *draft.reasons,
    )
    return replace(draft, reasons=reasons)


def _of_rewrite(draft: PlanDraft, rewrite: BlockRewrite, nodes: Sequence[NodePlan]) -> Iterable[Reason]:
    """Yield the reasons of each rule and target; modules of a block are written as a choice.

    Experts of a program that trains have further ones: their adapters, and what a token leaves for backward.
    """
    groups: dict[tuple[str, str], list[NodePlan]] = {}
    for plan in nodes:
        groups.setdefault((plan.claim.rule, plan.target.name), []).append(plan)
    for (rule, _), plans in groups.items():
        first, names = plans[0], [plan.action.fqn for plan in plans]
        tail = names[0] if len(names) == 1 else "{" + ",".join(names) + "}"
        what = f"{collapse([site.fqn for site in rewrite.sites])}.{tail}".rstrip(".")
        why = first.target.explain(first, draft.captured_node(first.claim), draft.lora_of(first))
        adapter = first.siblings.get("adapter")
        yield from (Reason(what, f"{text}: rule `{rule}` ({first.claim.span})") for text in why[:1])
        if draft.lora and adapter is not None and adapter.target.adapts == "experts" and first.target.takes_experts:
            by = f"rule `{adapter.rule}` ({adapter.span})"
            yield Reason(what, f"take LoRA on {_ranks(draft.lora, first.claim.path)}, in the same node: {by}")
        yield from (Reason(what, text) for text in why[1:])


def _of_recurrences(draft: PlanDraft) -> Iterator[Reason]:
    """Yield that the cores of rewritten recurrent layers run as stock."""
    for rewrite in draft.rewrites:
        block = draft.captured.block(rewrite.block)
        if block.recurrent:
            text = f"is recurrent: rules rewrite its projections, and the core of `{block.class_name}` runs as stock"
            yield Reason(collapse([site.fqn for site in rewrite.sites]), text)


def _ranks(lora: LoraPlan, path: str) -> str:
    """Return the adapted weights of the experts at `path`, with their ranks."""
    weights = [weight for weight in lora.parameters if weight.rpartition(".")[0] == path]
    return " and ".join(f"{name.rpartition('.')[2]} (r={lora.rank_pattern.get(name, lora.r)})" for name in weights)


def _of_uncaptured(draft: PlanDraft, plan: NodePlan) -> Reason:
    claim = plan.claim
    (text, *_) = plan.target.explain(plan, draft.captured_node(claim), draft.lora_of(plan))
    return Reason(claim.path, f"{text}: rule `{claim.rule}` ({claim.span})")


def _of_placements(placements: Sequence[Placement]) -> Iterable[Reason]:
    """Yield one reason per rule, device and kind of path."""
    groups: dict[tuple[str, str, str], list[Placement]] = {}
    for placement in placements:
        if placement.rule:
            kind = split_at_number(placement.fqn)[0]
            groups.setdefault((placement.rule, placement.device, kind), []).append(placement)
    for (rule, device, _), placed in groups.items():
        yield Reason(collapse([p.fqn for p in placed]), f"on {device}: rule `{rule}` ({placed[0].span})")


def _untouched(draft: PlanDraft) -> Iterator[Reason]:
    touched = {site.fqn for rewrite in draft.rewrites for site in rewrite.sites}
    misses = draft.request.matches.near_misses
    for block in draft.captured.blocks:
        sites = [s.fqn for s in draft.captured.sites_of(block.key) if s.fqn not in touched]
        if not sites:
            continue
        if block.graph is None:
            yield Reason(collapse(sites), f"stays as it is: `{block.class_name}` {block.unchanged}")
            continue
        left = {site: draft.left[site] for site in sites if site in draft.left}
        for reason in dict.fromkeys(left.values()):
            yield Reason(collapse([site for site in left if left[site] == reason]), f"stays as it is: {reason}")
        if others := [site for site in sites if site not in left]:
            nearest = max((miss for miss in misses if miss.block == block.key), key=lambda m: m.matched, default=None)
            why = f"closest: {nearest}" if nearest is not None else "no rule names it"
            yield Reason(collapse(others), f"stays as it is: {why}")

"""Why the plan is as it is: one sentence per rewrite, placement and untouched block. Layers are written as ranges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ktc.capture import BlockSite, CapturedModel
from ktc.dsl.schema import TARGETS
from ktc.host import Host
from ktc.match import Matches
from ktc.plan.kernel_spec import KernelSpec
from ktc.plan.types import BlockRewrite, Claim, NodeAction, Placement, Reason


def explain(
    captured: CapturedModel,
    matches: Matches,
    claims: Sequence[Claim],
    rewrites: Sequence[BlockRewrite],
    placements: Sequence[Placement],
    host: Host,
) -> tuple[Reason, ...]:
    """The reasons in the order of the model: rewrites, placements, then what stays as it is and why."""
    return (
        *(reason for rewrite in rewrites for reason in _of_rewrite(rewrite, host)),
        *_not_built(captured, claims),
        *(_of_placement(p) for p in placements if p.rule),
        *_untouched(captured, matches, rewrites),
    )


def _of_rewrite(rewrite: BlockRewrite, host: Host) -> Iterable[Reason]:
    """One reason per rule and kind of rewrite; modules of a block are written as a choice."""
    groups: dict[tuple[str, str], list[NodeAction]] = {}
    for action in rewrite.actions:
        groups.setdefault((action.rule, action.target), []).append(action)
    for actions in groups.values():
        names = [a.fqn for a in actions]
        tail = names[0] if len(names) == 1 else "{" + ",".join(names) + "}"
        yield Reason(f"{collapse(rewrite.sites)}.{tail}", _of_action(actions[0], rewrite, host))


def _of_action(action: NodeAction, rewrite: BlockRewrite, host: Host) -> str:
    where = f"rule `{action.rule}` ({action.span})"
    if action.kernel is None:
        return f"takes LoRA, on {rewrite.device}: {where}"
    spec = action.kernel
    automatic = action.settings["isa"] == "auto"
    chosen = f"the best this host can run{_passed_over(spec, host)}" if automatic else "asked for"
    moved = "" if rewrite.device == "cpu" else f", hidden states move {rewrite.device} -> cpu -> {rewrite.device}"
    how = f"{spec.format_down} weights, {spec.isa} kernel, {chosen}"
    return f"routed experts as one node on cpu ({how}){moved}: {where}"


def _passed_over(spec: KernelSpec, host: Host) -> str:
    """The host's better ISAs, for which ktc has no kernel yet."""
    better = host.isas[: host.isas.index(spec.isa)] if spec.isa in host.isas else ()
    return f"; {', '.join(better)}: no kernel in this version" if better else ""


def _not_built(captured: CapturedModel, claims: Sequence[Claim]) -> Iterable[Reason]:
    groups: dict[tuple[str, str], dict[str, Claim]] = {}
    for claim in claims:
        if not TARGETS[claim.target].available:
            groups.setdefault((claim.rule, claim.target), {})[claim.site or claim.path] = claim
    for (rule, target), by_site in groups.items():
        sites = [site for site in captured.sites if site.fqn in by_site]
        first = next(iter(by_site.values()))
        path = collapse(sites) if sites else first.path
        yield Reason(path, f"`{target}`: planned, not available in this version: rule `{rule}` ({first.span})")


def _of_placement(placement: Placement) -> Reason:
    return Reason(placement.fqn, f"on {placement.device}: rule `{placement.rule}` ({placement.span})")


def _untouched(captured: CapturedModel, matches: Matches, rewrites: Sequence[BlockRewrite]) -> Iterable[Reason]:
    touched = {site.fqn for rewrite in rewrites for site in rewrite.sites}
    for block in captured.blocks:
        sites = [s for s in captured.sites_of(block.key) if s.fqn not in touched]
        if not sites:
            continue
        if block.graph is None:
            yield Reason(
                collapse(sites), f"stays as it is: `{block.class_name}` could not be captured ({block.opaque})"
            )
            continue
        nearest = max((m for m in matches.near_misses if m.block == block.key), key=lambda m: m.matched, default=None)
        why = f"closest: {nearest}" if nearest is not None else "no rule names it"
        yield Reason(collapse(sites), f"stays as it is: {why}")


def collapse(sites: Sequence[BlockSite]) -> str:
    """`model.layers.[1..26].mlp` for sites that differ only in their layer."""
    layers = sorted(site.layer for site in sites)
    if len(layers) == 1:
        return sites[0].fqn
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    shown = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)
    before, _, after = sites[0].fqn.partition(f".{sites[0].layer}.")
    return f"{before}.[{shown}].{after}"

"""Why the plan is as it is: one sentence per rewrite, placement and untouched block. Layers are written as ranges.

Experts of a plan that trains have two more: their adapters, and what a token leaves for backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ktc.diagnostics import listing
from ktc.foundation.host import Host
from ktc.model.kernels.kernel_spec import KernelSpec
from ktc.model.kernels.linear_spec import LinearSpec, PackedLinearSpec
from ktc.model.targets import (
    CpuMoe,
    FusedAttention,
    KtLinear,
    LoraExperts,
    LoraLinear,
    MlaAbsorbed,
    SparseAttention,
    Train,
)
from ktc.model.targets.quantisation import Quantisation
from ktc.model.targets.target import NodeAction, Spec, Target
from ktc.stages.capture import CapturedModel
from ktc.stages.match import Matches
from ktc.stages.plan.decode_attention import told_codes
from ktc.stages.plan.latent import told
from ktc.stages.plan.sparse import told_sparse
from ktc.stages.plan.types import BlockRewrite, Claim, LoraPlan, OutsideLinear, Placement, PlannedOnly, Reason
from ktc.stages.plan.working_memory import slots_of


def explain(
    captured: CapturedModel,
    matches: Matches,
    rewrites: Sequence[BlockRewrite],
    planned: Sequence[PlannedOnly],
    placements: Sequence[Placement],
    claims: Sequence[Claim],
    lora: LoraPlan | None,
    host: Host,
    outside: Sequence[OutsideLinear],
    left: Mapping[str, str],
) -> tuple[Reason, ...]:
    """Return the reasons in the order of the model: rewrites, placements, then unchanged modules.

    `left` has the reasons of blocks that rules name and that keep their own code.
    """
    return (
        *(reason for rewrite in rewrites for reason in _of_rewrite(captured, rewrite, claims, lora, host)),
        *map(_of_outside, outside),
        *(_of_planned(p) for p in planned),
        *_of_placements(placements),
        *_untouched(captured, matches, rewrites, planned, left),
    )


def _of_rewrite(
    captured: CapturedModel, rewrite: BlockRewrite, claims: Sequence[Claim], lora: LoraPlan | None, host: Host
) -> Iterable[Reason]:
    """Yield one reason per rule and kind of rewrite; modules of a block are written as a choice."""
    groups: dict[tuple[str, str], list[NodeAction]] = {}
    for action in rewrite.actions:
        if isinstance(action.target, Quantisation | Train):  # `plan/trained.py` says what becomes of its weights
            continue
        groups.setdefault((action.rule, action.target.name), []).append(action)
    for actions in groups.values():
        names = [a.fqn for a in actions]
        tail = names[0] if len(names) == 1 else "{" + ",".join(names) + "}"
        what = f"{collapse([site.fqn for site in rewrite.sites])}.{tail}".rstrip(".")
        yield Reason(what, _of_action(captured, actions[0], rewrite, host))
        target, spec = actions[0].target, actions[0].kernel
        if lora is not None and isinstance(target, CpuMoe) and isinstance(spec, KernelSpec):
            path = actions[0].at(rewrite.sites[0].fqn)
            yield from (Reason(what, why) for why in _of_training(spec, target, path, claims, lora))


def _of_outside(outside: OutsideLinear) -> Reason:
    action = outside.action
    where = f"rule `{action.rule}` ({action.span})"
    return Reason(action.fqn, f"{_of_linear(action.target, action.kernel)}, on {outside.device}: {where}")


def _of_action(captured: CapturedModel, action: NodeAction, rewrite: BlockRewrite, host: Host) -> str:
    where = f"rule `{action.rule}` ({action.span})"
    spec = action.kernel
    if isinstance(action.target, LoraLinear):
        return f"takes LoRA, on {rewrite.device}: {where}"
    if isinstance(action.target, MlaAbsorbed):
        codes = told_codes(captured, rewrite.block, action)
        return f"{told(captured, rewrite.block, action)}{codes}, on {rewrite.device}: {where}"
    if isinstance(action.target, SparseAttention):
        return f"{told_sparse(captured, rewrite.block, action)}, on {rewrite.device}: {where}"
    if isinstance(action.target, FusedAttention) and spec is not None:
        codes = told_codes(captured, rewrite.block, action)
        return f"few new tokens without gradients by the {spec.isa} kernel, all others by sdpa{codes}, on cpu: {where}"
    if not isinstance(spec, KernelSpec):
        return f"{_of_linear(action.target, spec)}, on {rewrite.device}: {where}"
    automatic = action.target.settings["isa"] == "auto"
    chosen = f"the best this host can run{_passed_over(spec, host)}" if automatic else "requested"
    moved = "" if rewrite.device == "cpu" else f", hidden states move {rewrite.device} -> cpu -> {rewrite.device}"
    how = f"{' and '.join(spec.formats)} weights, {spec.isa} kernel, {chosen}"
    if action.prefill:
        devices = listing(action.prefill.devices)
        sent = "where the weights stay" if action.prefill.resident else "where the weights are sent"
        moved += f"; from {action.prefill.tokens} tokens on {devices}, {sent}"
    return f"routed experts as one node on cpu ({how}){moved}: {where}"


def _of_linear(target: Target, spec: Spec | None) -> str:
    if isinstance(spec, PackedLinearSpec):
        return f"{spec.weight_format} weights, {spec.isa} kernel for few and for many rows"
    if not isinstance(spec, LinearSpec) or not isinstance(target, KtLinear):
        return "is run by PyTorch"
    by = f"by the {spec.isa} kernel for {spec.dtype}"
    few = [f"few rows without gradients {by}"] * (target.kernel == "gemv")
    faster = ", or by PyTorch if that is faster on this processor" * (target.prefill == "auto")
    many = [f"many rows {by}{faster}"] * (target.prefill in ("packed", "auto"))
    return ", ".join((*few, *many, "all others by PyTorch"))


def _of_training(spec: KernelSpec, target: CpuMoe, path: str, claims: Sequence[Claim], lora: LoraPlan) -> Iterable[str]:
    """Describe the adapters of the experts at `path`, and the bytes a token saves for backward, with both choices."""
    weights = [weight for weight in lora.parameters if weight.rpartition(".")[0] == path]
    ranks = {weight.rpartition(".")[2]: lora.rank_pattern.get(weight, lora.r) for weight in weights}
    claim = next((c for c in claims if isinstance(c.target, LoraExperts) and c.path == path), None)
    if claim is not None:
        named = " and ".join(f"{name} (r={rank})" for name, rank in ranks.items())
        yield f"take LoRA on {named}, in the same node: rule `{claim.rule}` ({claim.span})"
    down = ranks.pop("down_proj", 0)
    of_products = max(ranks.values(), default=0), down
    chosen, other = target.activations, {"keep": "recompute", "recompute": "keep"}
    kept, instead = (slots_of(spec, keep=each == "keep", ranks=of_products).saved for each in (chosen, other[chosen]))
    how = "gate and up are kept" if chosen == "keep" else "gate and up are computed again"
    yield f"{kept:,} bytes per token and layer wait for backward: {how} (`activations = {other[chosen]}`: {instead:,})"


def _passed_over(spec: KernelSpec, host: Host) -> str:
    """Describe the host's better ISAs, for which ktc has no kernel yet."""
    better = host.isas[: host.isas.index(spec.isa)] if spec.isa in host.isas else ()
    return f"; {', '.join(better)}: no kernel in this version" if better else ""


def _of_planned(planned: PlannedOnly) -> Reason:
    why = f"`{planned.target}`: planned, not available in this version: rule `{planned.rule}` ({planned.span})"
    return Reason(collapse(planned.paths), why)


def _of_placements(placements: Sequence[Placement]) -> Iterable[Reason]:
    """Yield one reason per rule, device and kind of path."""
    groups: dict[tuple[str, str, str], list[Placement]] = {}
    for placement in placements:
        if placement.rule:
            groups.setdefault((placement.rule, placement.device, _split(placement.fqn)[0]), []).append(placement)
    for (rule, device, _), held in groups.items():
        yield Reason(collapse([p.fqn for p in held]), f"on {device}: rule `{rule}` ({held[0].span})")


def _untouched(
    captured: CapturedModel, matches: Matches, rewrites: Sequence[BlockRewrite], planned: Sequence[PlannedOnly],
    left: Mapping[str, str],
) -> Iterable[Reason]:  # fmt: skip
    touched = {site.fqn for rewrite in rewrites for site in rewrite.sites} | {path for p in planned for path in p.paths}
    for block in captured.blocks:
        sites = [s.fqn for s in captured.sites_of(block.key) if s.fqn not in touched]
        if not sites:
            continue
        if block.graph is None:
            yield Reason(collapse(sites), f"stays as it is: `{block.class_name}` {block.unchanged}")
            continue
        for reason in dict.fromkeys(left[site] for site in sites if site in left):
            yield Reason(collapse([s for s in sites if left.get(s) == reason]), f"stays as it is: {reason}")
        sites = [site for site in sites if site not in left]
        if not sites:
            continue
        nearest = max((m for m in matches.near_misses if m.block == block.key), key=lambda m: m.matched, default=None)
        why = f"closest: {nearest}" if nearest is not None else "no rule names it"
        yield Reason(collapse(sites), f"stays as it is: {why}")


def collapse(paths: Sequence[str]) -> str:
    """`model.layers.[1..26].mlp` for paths that differ only in their first number."""
    numbers = sorted(number for _, number in map(_split, paths) if number is not None)
    if len(paths) == 1 or not numbers:
        return paths[0]
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)
    return _split(paths[0])[0].replace("*", f"[{shown}]")


def _split(path: str) -> tuple[str, int | None]:
    """Return a path with its first number as `*`, and that number."""
    parts = path.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return (path, None) if at is None else (".".join([*parts[:at], "*", *parts[at + 1 :]]), int(parts[at]))

"""Captured model, matches and rules on a host -> `Plan`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import fx

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.host import Host
from ktc.language.dsl.ruleset import RuleSet
from ktc.model.checkpoint import WeightSource
from ktc.model.graph import ops
from ktc.model.graph.typed import nodes_by_name, nodes_of
from ktc.model.kernels.kernel_spec import KernelSpec
from ktc.model.kernels.linear_spec import PackedLinearSpec
from ktc.model.kernels.spec import Spec
from ktc.model.targets import CpuMoe, KtLinear, ModuleTarget, SparseAttention
from ktc.model.targets.settings import FLASH_DECODE
from ktc.model.targets.target import NodeAction, Prefill
from ktc.stages.capture import BlockSite, CapturedModel
from ktc.stages.match import Matches
from ktc.stages.plan.adapter_uses import adapter_warnings
from ktc.stages.plan.adapters import plan_lora, without_adapter
from ktc.stages.plan.availability import not_built, planned_only
from ktc.stages.plan.claims import resolve_claims
from ktc.stages.plan.decode_attention import choose_attention, coded_caches, with_int8_caches
from ktc.stages.plan.decode_graph import decide_graph
from ktc.stages.plan.explain import collapse, explain
from ktc.stages.plan.kernels import StoredFormat, StoredFormats, choose_kernel
from ktc.stages.plan.latent import on_latents
from ktc.stages.plan.linears import choose_linear, stored_rows
from ktc.stages.plan.memory import over_budget, plan_memory
from ktc.stages.plan.native_step import decide_step
from ktc.stages.plan.outside import outside_linears
from ktc.stages.plan.own_attention import on_known_functions
from ktc.stages.plan.placement import device_of, place
from ktc.stages.plan.prefill import expert_rings, plan_prefill, resident_bytes, stay_resident
from ktc.stages.plan.shared_modules import on_own_modules
from ktc.stages.plan.sparse import choose_sparse, on_long_caches, with_indices
from ktc.stages.plan.stored import conversions
from ktc.stages.plan.streams import plan_streams
from ktc.stages.plan.trained import TrainedWeights, plan_weights
from ktc.stages.plan.types import (
    ANY_SIZE,
    BlockRewrite,
    Claim,
    LoraPlan,
    MemoryPlan,
    OutsideLinear,
    Plan,
    Point,
    Reason,
    StreamedLinear,
)


def make_plan(
    captured: CapturedModel, weights: Sequence[WeightSource], matches: Matches, rules: RuleSet, host: Host,
    asked: Point = ANY_SIZE,
) -> Plan:  # fmt: skip
    """Decide everything that later stages carry out.

    `weights` is empty if MODEL is only a config; `asked` is the size of input that must fit. Raise InputRefused for
    conflicts and for a program that rewrites nothing, HostLacks for an ISA or a GPU that the host lacks. A plan that is
    over budget, or requests targets that are not built, is a value that records it.
    """
    own = on_own_modules(captured, resolve_claims(captured, matches, rules), matches)
    known = on_known_functions(captured, own.claims, matches)
    claims, left = on_latents(captured, known.claims, matches)
    sites = {**known.sites, **own.sites}
    trained = plan_weights(captured, claims, rules)
    claims = trained.claims
    placements = place(claims, rules, host)
    devices = {p.fqn: p.device for p in placements}
    sparse = on_long_caches(captured, claims, matches, devices)
    claims, in_dtype = with_int8_caches(captured, sparse.claims)
    trains = rules.plan.get("mode") == "train" or any(claim.facet == "adapter" for claim in claims)
    chosen = _choose(captured, weights, claims, devices, host, trained, trains=trains)
    specs = {claim.path: spec for claim, spec in chosen.items() if isinstance(spec, KernelSpec)}
    linears = {claim.path: spec for claim, spec in chosen.items() if isinstance(spec, PackedLinearSpec)}
    prefills, streams = plan_prefill(claims, rules, host), plan_streams(captured, claims, rules, host)
    rewrites = _group(captured, claims, chosen, devices, prefills, trained)
    outside = outside_linears(captured, claims, chosen, devices)
    unavailable = not_built(claims, chosen, rules)
    lora = plan_lora(captured, claims, rules, trained)
    graph = decide_graph(captured, claims, devices, streams, rules)
    if not rewrites and not outside and not unavailable and not trained.modules:
        raise InputRefused(_nothing_to_rewrite(captured, matches, (*own.warnings, *known.warnings)))
    threads = max((claim.target.num_threads(host) for claim in claims), default=1)
    mode = str(rules.plan.get("mode") or ("train" if lora else "infer"))
    step = decide_step(captured, claims, devices, graph, mode, rules, host)
    given = (specs, lora, rules, host, asked, streams)
    memory = _memory(captured, rewrites, devices, *given, prefills, outside, linears, trained)
    resident = stay_resident(prefills, specs, memory, rules, mode)
    if resident != prefills:
        rewrites = _group(captured, claims, chosen, devices, resident, trained)
        memory = _memory(captured, rewrites, devices, *given, resident, outside, linears, trained)
    return Plan(
        host=host,
        mode=mode,
        threads=threads,
        rewrites=rewrites,
        placements=placements,
        kernels=tuple(dict.fromkeys((*specs.values(), *chosen.values(), *((step.spec,) if step.spec else ())))),
        lora=lora,
        memory=memory,
        reasons=(
            *explain(captured, matches, rewrites, planned_only(claims), placements, claims, lora, host, outside, sites),
            *map(_dense, sparse.dense),
            *trained.reasons,
            *conversions(captured, weights, specs, linears),
            *graph.reasons,
            *step.reasons,
        ),
        warnings=(
            *matches.warnings,
            *own.warnings,
            *known.warnings,
            *left,
            *sparse.warnings,
            *in_dtype,
            *_left_alone(captured, rewrites, own.sites),
            *(() if step.spec else graph.warnings(rules)),  # the program names both, for either place
            *step.warnings(rules),
            *without_adapter(rules, lora),
            *adapter_warnings(captured, lora),
        ),
        over_budget=over_budget(memory, mode, asked),
        unavailable=unavailable,
        planned_only=planned_only(claims),
        streams=streams,
        outside=outside,
        cuda_graph=graph.used,
    )


def _memory(
    captured: CapturedModel, rewrites: Sequence[BlockRewrite], devices: Mapping[str, str],
    specs: Mapping[str, KernelSpec], lora: LoraPlan | None, rules: RuleSet, host: Host, asked: Point,
    streams: Sequence[StreamedLinear], prefills: Mapping[str, Prefill], outside: Sequence[OutsideLinear],
    linears: Mapping[str, PackedLinearSpec], trained: TrainedWeights,
) -> MemoryPlan:  # fmt: skip
    """Return the memory plan with what streamed weights take on each device."""
    streaming = resident_bytes(prefills, specs)
    rings = expert_rings(prefills, specs) | {(each.device, max(each.buffer, each.nbytes)) for each in streams}
    for device, size in rings:
        streaming[device] = streaming.get(device, 0) + size
    return plan_memory(
        coded_caches(with_indices(captured, rewrites), rewrites),
        rewrites,
        devices,
        specs,
        lora,
        rules,
        host,
        asked,
        streams,
        streaming,
        outside,
        linears,
        trained,
    )


def _choose(
    captured: CapturedModel,
    weights: Sequence[WeightSource],
    claims: Sequence[Claim],
    devices: Mapping[str, str],
    host: Host,
    trained: TrainedWeights,
    *,
    trains: bool,
) -> dict[Claim, Spec]:
    """Return the kernel of every claim whose target has one."""
    chosen: dict[Claim, Spec] = {}
    in_blocks = stored_rows(() if trains else weights)
    for claim in claims:
        if isinstance(claim.target, CpuMoe):
            stored = _stored_formats(captured, weights, claim.path)
            weights_of = trained.of(claim.path)
            chosen[claim] = choose_kernel(claim, claim.target, _node(captured, claim), stored, host, weights_of)
        elif isinstance(claim.target, KtLinear):
            device = device_of(claim.path, devices)
            blocks = in_blocks.get(claim.path)
            if spec := choose_linear(claim, claim.target, captured.model.dtype, device, host, blocks):
                chosen[claim] = spec
        elif isinstance(claim.target, SparseAttention) and claim.node:
            if sparse := choose_sparse(captured.model.dtype, device_of(claim.path, devices), host):
                chosen[claim] = sparse
        elif claim.target.settings.get("kernel") == FLASH_DECODE and claim.node:
            device = device_of(claim.path, devices)
            chosen[claim] = choose_attention(claim, captured.model.dtype, device, host)
    return chosen


def _node(captured: CapturedModel, claim: Claim) -> fx.Node:
    graph = captured.block(claim.block).graph
    assert graph is not None
    return nodes_by_name(graph)[claim.node]


def _stored_formats(captured: CapturedModel, weights: Sequence[WeightSource], path: str) -> StoredFormats:
    """Return how the checkpoint stores the experts' matrices; without a checkpoint, the config's format."""
    stored: tuple[set[StoredFormat], set[StoredFormat]] = (set(), set())
    for source in weights:
        parent, _, leaf = source.target.rpartition(".")
        if parent == path and not leaf.endswith("_bias") and not (source.part or "").endswith("_bias"):
            stored[leaf.startswith("down")].add(_stored_format(source))
    by_config = ((captured.stored_format, captured.stored_group),)
    gate_up, down = (tuple(sorted(formats)) or by_config for formats in stored)
    return gate_up, down


def _stored_format(source: WeightSource) -> StoredFormat:
    return source.kept_as or (source.quantised.method if source.quantised else source.dtype, 0)


def _group(
    captured: CapturedModel,
    claims: Sequence[Claim],
    chosen: Mapping[Claim, Spec],
    devices: Mapping[str, str],
    prefills: Mapping[str, Prefill],
    trained: TrainedWeights,
) -> tuple[BlockRewrite, ...]:
    """Sites of one block with the same actions on the same devices are one rewrite."""
    by_site: dict[str, list[Claim]] = {}
    for claim in claims:
        if isinstance(claim.target, ModuleTarget) and claim.node and trained.realises(claim):
            by_site.setdefault(claim.site, []).append(claim)
    groups: dict[object, tuple[list[BlockSite], tuple[NodeAction, ...]]] = {}
    for site in captured.sites:
        held = by_site.get(site.fqn)
        if not held:
            continue
        actions = tuple(_action(claim, chosen.get(claim), prefills, trained) for claim in held)
        device = device_of(site.fqn, devices)
        done = tuple((a.node, a.target, a.kernel, a.prefill, a.weights) for a in actions)
        groups.setdefault((site.block, device, done), ([], actions))[0].append(site)
    counts: dict[str, int] = {}
    rewrites: list[BlockRewrite] = []
    for sites, actions in groups.values():
        block = sites[0].block
        counts[block] = counts.get(block, 0) + 1
        key = block if counts[block] == 1 else f"{block}_{counts[block]}"
        pinned = {a.node: device for a in actions if (device := a.target.pinned)}
        rewrites.append(BlockRewrite(key, block, tuple(sites), actions, device_of(sites[0].fqn, devices), pinned))
    return tuple(rewrites)


def _action(claim: Claim, kernel: Spec | None, prefills: Mapping[str, Prefill], trained: TrainedWeights) -> NodeAction:
    fqn = claim.path.removeprefix(claim.site).lstrip(".")
    prefill = prefills.get(claim.path) if isinstance(kernel, KernelSpec) else None
    weights = trained.of(claim.path)
    return NodeAction(claim.node, fqn, claim.target, claim.rule, claim.span, kernel, prefill, weights)


def _dense(claims: Sequence[Claim]) -> Reason:
    """Return why layers with a sparse rewrite stay dense."""
    first = claims[0]
    why = f"stays dense (`dense_layers = {first.target.settings['dense_layers']}`): rule `{first.rule}` ({first.span})"
    return Reason(collapse([claim.site for claim in claims]), why)


def _left_alone(
    captured: CapturedModel, rewrites: Sequence[BlockRewrite], told: Collection[str]
) -> Iterator[Diagnostic]:
    """Yield a warning for every block that could not be captured and for routed experts that no rule rewrites.

    Sites in `told` have one already.
    """
    rewritten = {*told} | {
        site.fqn for r in rewrites for site in r.sites if any(a.target.takes_experts for a in r.actions)
    }
    for block in captured.blocks:
        sites = [site.fqn for site in captured.sites_of(block.key) if site.fqn not in rewritten]
        if block.graph is None:
            why = (
                f"`{block.class_name}`: {block.unchanged}"
                if block.refuted
                else f"`{block.class_name}` {block.unchanged}"
            )
        elif any(ops.operator(node) == "experts" for node in nodes_of(block.graph)):
            why = f"no rule rewrites the routed experts of `{block.class_name}`"
        else:
            continue
        if sites:
            message = f"{collapse(sites)} stays as it is: {why}"
            hint = "docs/proofs.md lists what is compared" if block.refuted else "`ktc graph MODEL` shows its blocks"
            yield Diagnostic(block.refuted or "M073", message, hint=hint, severity="warning")


def _nothing_to_rewrite(captured: CapturedModel, matches: Matches, left: Sequence[Diagnostic]) -> Diagnostic:
    has_experts = any(
        ops.operator(n) == "experts" for b in captured.blocks if b.graph is not None for n in nodes_of(b.graph)
    )
    opaque = next((b for b in captured.blocks if b.graph is None), None)
    nearest = max(matches.near_misses, key=lambda m: m.matched, default=None)
    if left:
        hint = left[0].message
    elif nearest is not None and has_experts:
        hint = f"closest: {nearest}"
    elif opaque is not None:
        hint = f"`{opaque.class_name}` {opaque.unchanged}"
    else:
        hint = "look at its blocks with `ktc graph MODEL`"
    kind = captured.source.config.model_type
    return Diagnostic("M071", f"no rule rewrites anything in this `{kind}` model", hint=hint)

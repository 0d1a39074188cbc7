"""The serialisable picture of every stage: captured, matched, planned, rewritten. In: the values of the stages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

from torch import fx

from ktc.stages.capture import BlockGraph, BlockSite, CapturedModel
from ktc.stages.match import Binding, Match, Matches, NodeRef, NodeSet, SubMatch
from ktc.stages.pictures.dump import SCHEMA, BlockDump, MatchDump, ModelDump, ModuleDump, NodeDump, Stage, dump_block
from ktc.stages.plan import BlockRewrite, Plan
from ktc.stages.plan.placement import device_of
from ktc.stages.rewrite import RewrittenBlock

STAGES: tuple[Stage, ...] = ("captured", "matched", "planned", "rewritten")


def dump_stage(
    stage: Stage,
    captured: CapturedModel,
    matches: Matches | None,
    plan: Plan | None,
    blocks: Sequence[RewrittenBlock] = (),
) -> ModelDump:
    """Return the picture of `stage`; values of later stages may be None for an earlier one."""
    placements = {p.fqn: p.device for p in plan.placements} if plan is not None and stage != "captured" else None
    rules = _module_rules(blocks)
    modules = tuple(
        ModuleDump(
            module.fqn,
            module.class_name,
            sum(math.prod(t.shape) for t in module.tensors if t.trainable),
            sum(t.bytes for t in module.tensors),
            device_of(module.fqn, placements) if placements else "",
            rules.get(module.fqn, "") if stage == "rewritten" else "",
        )
        for module in captured.modules
    )
    graphs: list[tuple[BlockRewrite, fx.GraphModule | None]] = []
    if stage == "rewritten":
        graphs = [(block.rewrite, block.graph) for block in blocks]
    elif stage == "planned" and plan is not None:
        graphs = [(rewrite, captured.block(rewrite.block).graph) for rewrite in plan.rewrites]
    shown = _blocks(captured, graphs, planned=stage == "planned")
    seen = matches if stage != "captured" else None
    return ModelDump(
        SCHEMA, stage, captured.source.config.model_type, str(captured.facts["dtype"]), modules, tuple(shown),
        tuple(_match(m) for m in seen.matches) if seen else (), tuple(map(str, seen.near_misses)) if seen else (),
    )  # fmt: skip


def _module_rules(blocks: Sequence[RewrittenBlock]) -> dict[str, str]:
    return {a.at(site.fqn): a.rule for b in blocks for site in b.rewrite.sites for a in b.rewrite.actions}


def _blocks(
    captured: CapturedModel, graphs: Sequence[tuple[BlockRewrite, fx.GraphModule | None]], *, planned: bool
) -> Iterator[BlockDump]:
    """Yield every block: one dump for each of its rewrites and one for the sites that no rewrite touches."""
    for block in captured.blocks:
        rest = captured.sites_of(block.key)
        for rewrite, graph in graphs:
            if rewrite.block == block.key and graph is not None:
                touched = {site.fqn for site in rewrite.sites}
                rest = tuple(site for site in rest if site.fqn not in touched)
                variant = replace(block, key=rewrite.key, graph=graph)
                dumped = _block(variant, rewrite.sites, _notes(rewrite) if planned else ())
                yield _marked(dumped, rewrite) if planned else dumped
        if rest:
            whole = len(rest) == len(captured.sites_of(block.key))
            yield _block(block if whole else replace(block, key=f"{block.key}_unchanged"), rest, ())


def _marked(block: BlockDump, rewrite: BlockRewrite) -> BlockDump:
    """Return the captured block with the plan on its nodes: the device of each, and the rule that will replace it."""
    rules, spans = dict[str, dict[str, None]](), dict[str, dict[str, None]]()
    for action in rewrite.actions:
        rules.setdefault(action.node, {})[action.rule] = None
        spans.setdefault(action.node, {})[str(action.span)] = None
    nodes: list[NodeDump] = []
    for node in block.nodes:
        placed = replace(node, device=rewrite.node_devices.get(node.name, rewrite.device))
        marks = ", ".join(rules.get(node.name, ())), ", ".join(spans.get(node.name, ()))
        nodes.append(replace(placed, rule=marks[0], span=marks[1]) if marks[0] else placed)
    return replace(block, nodes=tuple(nodes))


def _notes(rewrite: BlockRewrite) -> tuple[str, ...]:
    """Return the plan's actions on a block, one line each."""
    return tuple(
        f"{action.node} -> {action.target.name} at `{action.fqn}`"
        f" on {rewrite.node_devices.get(action.node, rewrite.device)}"
        + (f", kernel {action.kernel.entry}" if action.kernel else "")
        + (f", in decoding {action.prefill.in_decoding}" if action.prefill and action.prefill.in_decoding else "")
        + f" (rule {action.rule}, {action.span})"
        for action in rewrite.actions
    )


def _block(block: BlockGraph, sites: Sequence[BlockSite], notes: tuple[str, ...]) -> BlockDump:
    fqns, layers = tuple(s.fqn for s in sites), tuple(s.layer for s in sites)
    if block.graph is None:
        return BlockDump(
            block.key,
            block.class_name,
            fqns,
            layers,
            (),
            (f"unchanged: {block.unchanged}" if block.refuted else f"not captured: {block.opaque}", *notes),
        )
    return dump_block(block.graph, block.key, block.class_name, fqns, layers, notes)


def _match(match: Match) -> MatchDump:
    return MatchDump(match.rule, match.root, match.path, tuple(_captures(match.bindings)))


def _captures(bindings: Mapping[str, Binding], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, binding in bindings.items():
        if isinstance(binding, SubMatch):
            yield from _captures(binding.bindings, f"{prefix}{name}.")
        elif isinstance(binding, NodeSet):
            yield f"{prefix}{name}", ", ".join(binding.nodes)
        elif isinstance(binding, NodeRef):
            yield f"{prefix}{name}", binding.node + (f"[{binding.index}]" if binding.index else "")
        else:
            yield f"{prefix}{name}", f"{cast('float', binding):g}"

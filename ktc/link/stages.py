"""The serialisable picture of every stage: captured, matched, planned, rewritten. In: the values of the stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from ktc.capture import BlockGraph, BlockSite, CapturedModel
from ktc.graph.dump import SCHEMA, BlockDump, MatchDump, ModelDump, ModuleDump, Stage, dump_block
from ktc.match import Binding, Match, Matches, NodeRef, SubMatch
from ktc.plan import Plan
from ktc.plan.placement import device_of
from ktc.rewrite import RewrittenBlock

STAGES: tuple[Stage, ...] = ("captured", "matched", "planned", "rewritten")


def dump_stage(
    stage: Stage,
    captured: CapturedModel,
    matches: Matches | None,
    plan: Plan | None,
    blocks: Sequence[RewrittenBlock] = (),
) -> ModelDump:
    """The picture of `stage`; what a later stage adds may be None for an earlier one."""
    placements = {p.fqn: p.device for p in plan.placements} if plan is not None and stage != "captured" else None
    rules = _module_rules(blocks)
    modules = tuple(
        ModuleDump(
            module.fqn,
            module.class_name,
            sum(_count(t.shape) for t in module.tensors if t.trainable),
            sum(t.bytes for t in module.tensors),
            device_of(module.fqn, placements) if placements else "",
            rules.get(module.fqn, "") if stage == "rewritten" else "",
        )
        for module in captured.modules
    )
    shown = (
        _rewritten(captured, blocks)
        if stage == "rewritten"
        else _captured(captured, plan if stage == "planned" else None)
    )
    seen = matches if stage != "captured" else None
    return ModelDump(
        SCHEMA, stage, captured.source.config.model_type, str(captured.facts["dtype"]), modules, tuple(shown),
        tuple(_match(m) for m in seen.matches) if seen else (), tuple(map(str, seen.near_misses)) if seen else (),
    )  # fmt: skip


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _module_rules(blocks: Sequence[RewrittenBlock]) -> dict[str, str]:
    return {f"{site.fqn}.{a.fqn}": a.rule for b in blocks for site in b.rewrite.sites for a in b.rewrite.actions}


def _captured(captured: CapturedModel, plan: Plan | None) -> Iterator[BlockDump]:
    for block in captured.blocks:
        yield _block(block, captured.sites_of(block.key), _notes(block.key, plan))


def _notes(block: str, plan: Plan | None) -> tuple[str, ...]:
    """What the plan will do to a block, one line per action."""
    if plan is None:
        return ()
    return tuple(
        f"{action.node} -> {action.target} at `{action.fqn}` on {rewrite.node_devices.get(action.node, rewrite.device)}"
        + (f", kernel {action.kernel.entry}" if action.kernel else "")
        + f" (rule {action.rule}, {action.span})"
        for rewrite in plan.rewrites
        if rewrite.block == block
        for action in rewrite.actions
    )


def _rewritten(captured: CapturedModel, blocks: Sequence[RewrittenBlock]) -> Iterator[BlockDump]:
    touched: dict[str, list[RewrittenBlock]] = {}
    for block in blocks:
        touched.setdefault(block.rewrite.block, []).append(block)
    for block in captured.blocks:
        rewritten_sites: set[str] = set()
        for variant in touched.get(block.key, []):
            rewrite = variant.rewrite
            rewritten_sites |= {s.fqn for s in rewrite.sites}
            fqns, layers = tuple(s.fqn for s in rewrite.sites), tuple(s.layer for s in rewrite.sites)
            yield dump_block(variant.graph, rewrite.key, block.class_name, fqns, layers)
        rest = tuple(s for s in captured.sites_of(block.key) if s.fqn not in rewritten_sites)
        if rest:
            yield _block(block, rest, ())


def _block(block: BlockGraph, sites: Sequence[BlockSite], notes: tuple[str, ...]) -> BlockDump:
    fqns, layers = tuple(s.fqn for s in sites), tuple(s.layer for s in sites)
    if block.graph is None:
        return BlockDump(block.key, block.class_name, fqns, layers, (), (f"not captured: {block.opaque}", *notes))
    return dump_block(block.graph, block.key, block.class_name, fqns, layers, notes)


def _match(match: Match) -> MatchDump:
    return MatchDump(match.rule, match.root, match.path, tuple(_captures(match.bindings)))


def _captures(bindings: Mapping[str, Binding], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, binding in bindings.items():
        if isinstance(binding, SubMatch):
            yield from _captures(binding.bindings, f"{prefix}{name}.")
        elif isinstance(binding, NodeRef):
            yield f"{prefix}{name}", binding.node + (f"[{binding.index}]" if binding.index else "")
        else:
            yield f"{prefix}{name}", f"{cast(float, binding):g}"

"""The realisation recipe: which module is put at which FQN of the HF model, as the manifest records it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ktc.foundation.host import Host
from ktc.model.experts.own_module import OwnExperts
from ktc.model.graph import ops
from ktc.model.graph.typed import nodes_of
from ktc.model.manifest.configs import GRAPH_BLOCK, HOST_TABLE, OWN_EXPERTS, GraphBlockConfig, OwnExpertsConfig
from ktc.model.manifest.manifest import Rewrite
from ktc.model.targets.config import plain
from ktc.model.targets.module_target import ITSELF, graph_target, module_target, primary_actions
from ktc.model.targets.target import NodeAction
from ktc.stages.capture import CapturedModel, ExpertList
from ktc.stages.plan import Plan
from ktc.stages.rewrite.apply import RewrittenBlock
from ktc.stages.rewrite.block_code import block_code


def recipe(blocks: Sequence[RewrittenBlock], host: Host) -> tuple[Rewrite, ...]:
    """Return every rewritten module of the model, in the order of its sites."""
    rows: list[tuple[int, Rewrite]] = []
    for block in blocks:
        nodes = {str(n.target): n for n in nodes_of(block.graph) if n.op == "call_module"}
        for site in block.rewrite.sites:
            if block.experts is not None:
                rows.append((site.layer, _graph_block(block, block.experts, site.fqn)))
            rows += [(site.layer, _own_experts(block, module, site.fqn)) for module in block.own_experts]
            placed = set[tuple[str, str]]()
            for action in primary_actions(block.rewrite.actions):
                place = action.at(site.fqn), module_target(action).module_name(action)
                if place in placed:  # a layer that its block calls twice is one module
                    continue
                placed.add(place)
                device = block.rewrite.node_devices.get(action.node, block.rewrite.device)
                # The adapter of a layer that another rewrite absorbs has no call of its own.
                call = nodes.get(graph_target(action)) or nodes[ITSELF]
                rows.append((site.layer, _step(action, place[0], device, ops.attributes(call), host)))
    return tuple(row for _, row in sorted(rows, key=lambda pair: pair[0]))


def linear_steps(plan: Plan) -> tuple[Rewrite, ...]:
    """Return the loader's steps for linear layers outside the blocks: those with a kernel, streamed ones, tables."""
    kernels = (_step(linear.action, linear.action.fqn, linear.device, {}, plan.host) for linear in plan.uncaptured)
    streamed = (
        Rewrite(s.fqn, "streamed_linear", None, s.device, {"stream_buffer": s.buffer}, s.rule, str(s.span))
        for s in plan.streams
    )
    table = plan.table
    tables = () if table is None else (Rewrite(table.fqn, HOST_TABLE, None, table.device, {}, "", ""),)
    return (*kernels, *streamed, *tables)


def _step(action: NodeAction, fqn: str, device: str, about: Mapping[str, Any], host: Host) -> Rewrite:
    """Return the loader's step for a node: the module, its kernel, its arguments."""
    target, entry = module_target(action), action.kernel.entry if action.kernel else None
    args = plain(target.recipe(action, about, host))
    return Rewrite(fqn, target.module_name(action), entry, device, args, action.rule, str(action.span))


def _own_experts(block: RewrittenBlock, module: OwnExperts, site: str) -> Rewrite:
    """Return the step before an experts module of the model's own is replaced: its tensors in the stock layout."""
    action = next(a for a in block.rewrite.actions if a.target.takes_experts and a.fqn == module.fqn)
    fqn = action.at(site)
    config = OwnExpertsConfig(*module.sizes, str(module.form), module.parts, module.inputs, module.called)
    return Rewrite(fqn, OWN_EXPERTS, None, block.rewrite.device, plain(config), action.rule, str(action.span))


def block_file(block: RewrittenBlock) -> str:
    """Return the file in OUT for the code of a rewritten block."""
    return f"blocks/{block.rewrite.key}.py"


def block_files(captured: CapturedModel, blocks: Sequence[RewrittenBlock]) -> Mapping[str, str]:
    """Return the code of the blocks whose graphs replace their own code, by its file in OUT."""
    return {block_file(block): _code(captured, block) for block in blocks if block.experts is not None}


def _code(captured: CapturedModel, block: RewrittenBlock) -> str:
    site = block.rewrite.sites[0].fqn
    stock = captured.model.get_submodule(site)
    where = f"`{site}`" if len(block.rewrite.sites) == 1 else f"`{site}` and {len(block.rewrite.sites) - 1} more"
    title = f"The computation of {where}: `{type(stock).__name__}`, its loop over experts as one call."
    return block_code(block.graph, stock, title, captured.model.dtype)


def _graph_block(block: RewrittenBlock, experts: ExpertList, fqn: str) -> Rewrite:
    """Return the first step of a block whose own code loops over its experts."""
    action = next(action for action in block.rewrite.actions if action.target.takes_experts)
    sizes = experts.count, experts.hidden, experts.intermediate
    config = GraphBlockConfig(block_file(block), experts.fqn, *sizes, experts.form, experts.parts)
    return Rewrite(fqn, GRAPH_BLOCK, None, block.rewrite.device, plain(config), action.rule, str(action.span))

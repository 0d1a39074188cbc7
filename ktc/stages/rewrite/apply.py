"""The passes of the rewrite targets, run in their fixed order over a copy of each block's graph.

A pass takes a graph and the actions of the plan, replaces matched nodes, and leaves the graph runnable and verified;
every new node says in `meta["rule"]` which rule made it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from ktc.model.experts.own_module import OwnExperts
from ktc.model.graph.typed import nodes_of
from ktc.model.graph.verify import verify
from ktc.model.targets import ROWS
from ktc.stages.capture import CapturedModel, ExpertList
from ktc.stages.plan import BlockRewrite, Plan

Pass = Callable[[fx.GraphModule, BlockRewrite], None]
# In the order of the table of targets.
PASSES: tuple[tuple[str, Pass], ...] = tuple((target.name, target.apply) for target in ROWS if target.changes_graphs)


@dataclass(frozen=True, slots=True)
class RewrittenBlock:
    """A distinct rewrite and the graph it led to. The graph's parameters are on meta until the loader binds them."""

    rewrite: BlockRewrite
    graph: fx.GraphModule
    experts: ExpertList | None = None  # the list that the stock block loops over: the graph then replaces its code
    own_experts: tuple[OwnExperts, ...] = ()  # the rewritten experts modules of the model's own code


def rewrite(captured: CapturedModel, plan: Plan) -> tuple[RewrittenBlock, ...]:
    """Return the plan's rewrites, carried out on copies of the captured graphs."""
    blocks: list[RewrittenBlock] = []
    for block_rewrite in plan.rewrites:
        block = captured.block(block_rewrite.block)
        assert block.graph is not None, f"the plan rewrites the opaque block `{block.key}`"
        fused = any(action.target.takes_experts for action in block_rewrite.actions)
        graph = rewrite_block(block.graph, block_rewrite)
        fqns = {action.fqn for action in block_rewrite.actions if action.target.takes_experts}
        own_experts = tuple(experts for experts in block.own_experts if experts.fqn in fqns)
        blocks.append(RewrittenBlock(block_rewrite, graph, block.experts if fused else None, own_experts))
    return tuple(blocks)


def rewrite_block(graph: fx.GraphModule, block_rewrite: BlockRewrite) -> fx.GraphModule:
    """Return a copy of `graph` after every pass."""
    rewritten = _copy(graph)
    for name, apply in PASSES:
        apply(rewritten, block_rewrite)
        rewritten.graph.eliminate_dead_code()
        verify(rewritten, after=name)
    rewritten.delete_all_unused_submodules()
    rewritten.recompile()
    return rewritten


def _copy(graph: fx.GraphModule) -> fx.GraphModule:
    """Copy the graph and its modules; tensors are shared, `meta` is copied node by node."""
    shared = {id(t): t for t in [*graph.parameters(), *graph.buffers()]}
    modules = copy.deepcopy(dict(graph.named_children()), dict(shared))
    holder = fx.GraphModule(graph, fx.Graph(), class_name=type(graph).__name__)
    for name, module in modules.items():
        holder.add_module(name, module)
    new, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes_of(graph):
        copies[node] = new.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
    for name, tensor in [*graph.named_parameters(recurse=False), *graph.named_buffers(recurse=False)]:
        setattr(holder, name, tensor)
    holder.graph = new
    return holder

"""Capture a block that loops over a list of experts: its graph with one `experts` node, and the list's contents.

Input: a block on meta tensors and its call. Output: the graph in normal form. It returns everything that the block
returns, since it replaces the block's own code at run time. Refused, with the reason: a loop that is more than routing,
a block that computes something else in training, and one called with more than hidden states.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ktc.capture.canonical import NoExperts, canonicalise, same_computation
from ktc.capture.expert_list import candidates, expert_list
from ktc.capture.export import export_block
from ktc.capture.normal_form import normalise
from ktc.capture.types import ExpertList
from ktc.capture.unrolled import routed_anyhow
from ktc.graph.typed import nodes_of


def capture_loop(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[fx.GraphModule, ExpertList] | None:
    """Return the graph and the experts, or None for a block without a list of experts.

    Raises NoExperts and the exceptions of torch.export.
    """
    lists = dict(candidates(block))
    leaves = pytree.tree_leaves((args, kwargs))
    if not lists or not isinstance(leaves[0], Tensor):
        return None
    found = [expert_list(fqn, modules, int(leaves[0].shape[-1])) for fqn, modules in lists.items()]
    experts = [experts for experts in found if experts is not None]
    if not experts:
        return None
    if len(experts) > 1:
        raise NoExperts(f"it has {len(experts)} lists of experts, `{experts[0].fqn}` and `{experts[1].fqn}`")
    if len(leaves) > 1 or "hidden_states" not in {"hidden_states" if args else "", *kwargs}:
        raise NoExperts("it is called with more than hidden states")
    modules = lists[experts[0].fqn]
    graph = _captured(block, args, kwargs, modules, experts[0])
    training = block.training
    try:
        trained = _captured(block.train(), args, kwargs, modules, experts[0])
    finally:
        block.train(training)
    if not same_computation(graph, trained):
        raise NoExperts("it computes something else in training mode")
    return graph, experts[0]


def _captured(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], modules: nn.ModuleList, experts: ExpertList
) -> fx.GraphModule:
    graph = export_block(block, args, kwargs, lambda: routed_anyhow(modules), whole=True)
    canonicalise(graph, experts)
    if any(str(node.target).startswith("constants.") for node in nodes_of(graph) if node.op == "get_attr"):
        raise NoExperts("it computes with a tensor that it creates itself")
    return normalise(graph)

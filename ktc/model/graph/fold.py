"""Folding: a region of a graph becomes one `call_module` node whose module holds the region's nodes.

The folded node computes the same as the region, so a graph stays runnable; patterns see one operator.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx, nn

from ktc.model.graph.typed import nodes_of


def fold(
    graph_module: fx.GraphModule, region: Iterable[fx.Node], result: fx.Node, first: fx.Node, name: str
) -> fx.Node:
    """Replace `region`, whose only value used outside is `result`, by one node `folded.<name>_<i>`.

    The node's first argument is `first`; its other inputs follow in the order in which the region uses them.
    """
    inside = set(region)
    ordered = [node for node in nodes_of(graph_module) if node in inside]
    escaping = [n for n in ordered if n is not result and any(user not in inside for user in n.users)]
    assert not escaping, f"`{escaping[0]}` is used outside the region folded as `{name}`"
    inputs = [first]
    for node in ordered:
        inputs += [i for i in node.all_input_nodes if i not in inside and i not in inputs]

    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in ordered:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[result])

    target = _hold(graph_module, graph, name)
    with graph_module.graph.inserting_after(result):
        node = graph_module.graph.call_module(target, tuple(inputs))
    node.meta = {**result.meta, "op": name}
    result.replace_all_uses_with(node)
    for dead in reversed(ordered):
        graph_module.graph.erase_node(dead)
    return node


def _hold(graph_module: fx.GraphModule, region: fx.Graph, name: str) -> str:
    """Put `region` below `graph_module.folded` and return its path: `folded.rope_0`, the next one `folded.rope_1`."""
    if not hasattr(graph_module, "folded"):
        graph_module.add_submodule("folded", nn.Module())
    holder = graph_module.get_submodule("folded")
    index = sum(child.rpartition("_")[0] == name for child, _ in holder.named_children())
    holder.add_module(f"{name}_{index}", fx.GraphModule(nn.Module(), region, class_name=name))
    return f"folded.{name}_{index}"


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of `node` that carry data, without sizes computed from shapes."""
    return [i for i in node.all_input_nodes if isinstance(i.meta.get("val"), torch.Tensor | tuple | list)]

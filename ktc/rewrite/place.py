"""`place`: every node gets its device, and a `transfer` node stands on every edge that crosses from one to another."""

from __future__ import annotations

from torch import fx

from ktc.graph import ops
from ktc.graph.typed import nodes_of, tensor_of
from ktc.plan import BlockRewrite


def apply(graph: fx.GraphModule, rewrite: BlockRewrite) -> None:
    """Writes `meta["device"]` into every node and inserts the transfers; only tensors are transferred."""
    pinned = {
        action.fqn: rewrite.node_devices[action.node]
        for action in rewrite.actions
        if action.node in rewrite.node_devices
    }
    for node in nodes_of(graph):
        elsewhere = node.op == "call_module" and str(node.target) in pinned
        node.meta["device"] = pinned[str(node.target)] if elsewhere else rewrite.device
    for node in nodes_of(graph):
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        for source in node.all_input_nodes:
            if source.meta["device"] != node.meta["device"] and tensor_of(source) is not None:
                node.replace_input_with(source, _moved(graph.graph, source, node))


def _moved(graph: fx.Graph, source: fx.Node, user: fx.Node) -> fx.Node:
    """`source` on the device of `user`; one transfer serves all users there."""
    device = user.meta["device"]
    for existing in source.users:
        if existing.target is ops.transfer and existing.args[1] == device:
            return existing
    with graph.inserting_after(source):
        moved = graph.call_function(ops.transfer, (source, device))
    moved.meta = {k: v for k, v in source.meta.items() if k in ("val", "shape", "dtype")}
    moved.meta |= {"op": "transfer", "device": device, "rule": user.meta.get("rule") or source.meta.get("rule", "")}
    return moved

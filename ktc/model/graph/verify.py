"""The contract of a block's graph after every pass. A violation is a bug of the pass, never of the user."""

from __future__ import annotations

from torch import fx

from ktc.model.graph import ops
from ktc.model.graph.typed import nodes_of, owner_of, tensor_of


def verify(graph: fx.GraphModule, after: str) -> None:
    """Assert that `graph` is well formed after the pass `after`.

    That is: fx's own lint, targets that resolve, an operator on every node, a shape on every tensor, one output.
    """
    graph.graph.lint()
    for node in nodes_of(graph):
        where = f"after `{after}`: `{node.name}`"
        if node.op == "call_module":
            graph.get_submodule(str(node.target))
            assert "op" in node.meta, f"{where} calls a module and has no operator name"
        if node.op == "get_attr":
            assert hasattr(*owner_of(graph, str(node.target))), f"{where} names no tensor"
        if node.op != "output" and tensor_of(node) is not None:
            assert node.meta.get("shape") is not None, f"{where} has no shape"
        assert ops.operator(node), f"{where} has no operator"
    outputs = sum(node.op == "output" for node in nodes_of(graph))
    assert outputs == 1, f"after `{after}`: {outputs} outputs"

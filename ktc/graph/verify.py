"""The contract that a block's graph keeps after every pass. A broken one is a bug of the pass, never of the user."""

from __future__ import annotations

from torch import Tensor, fx

from ktc.graph import ops


def verify(graph: fx.GraphModule, after: str) -> None:
    """Asserts that the graph is well formed: fx's own lint, names that resolve, an operator and a shape on every tensor."""
    graph.graph.lint()
    for node in graph.graph.nodes:
        where = f"after `{after}`: `{node.name}`"
        if node.op == "call_module":
            graph.get_submodule(str(node.target))
            assert "op" in node.meta, f"{where} calls a module and has no operator name"
        if node.op == "get_attr":
            owner, _, leaf = str(node.target).rpartition(".")
            assert hasattr(graph.get_submodule(owner), leaf), f"{where} names no tensor"
        if node.op != "output" and isinstance(node.meta.get("val"), Tensor):
            assert node.meta.get("shape") is not None, f"{where} has no shape"
        assert ops.operator(node), f"{where} has no operator"
    outputs = [n for n in graph.graph.nodes if n.op == "output"]
    assert len(outputs) == 1, f"after `{after}`: {len(outputs)} outputs"

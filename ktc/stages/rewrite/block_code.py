"""A rewritten graph as Python: the code that runs in place of a block which looped over its experts.

In: the graph, and the stock block on meta. Out: the text of `forward`, over torch operators and `self`. Layers are
called as modules, so that adapters and hooks on them count; the dtype of a half precision model is that of the hidden
states, so that the code runs in fp32 too.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from ktc.model.graph import ops
from ktc.model.graph.typed import input_of, nodes_of

_KNOWN = frozenset({"torch", "device", "inf", "nan", "getattr", "NoneType", "pytree", "fx_pytree"})
_MAKERS = frozenset({"zeros", "zeros_like", "ones", "full", "arange", "empty", "scalar_tensor"})
_DELETIONS = re.compile(r";  (?:\w+ = )+None$", re.MULTILINE)
_HALF = (torch.bfloat16, torch.float16)


def block_code(graph_module: fx.GraphModule, block: nn.Module, title: str, dtype: torch.dtype) -> str:
    """Return the text of the file. `block` is the stock module, `dtype` the model's."""
    graph = fx.Graph()
    graph.output(_Copy(graph, graph_module, block, dtype if dtype in _HALF else None).result())
    for node in [node for node in reversed(graph.nodes) if node.op not in ("placeholder", "output")]:
        if not node.users:
            graph.erase_node(node)
    code = graph.python_code("self")
    strange = code.globals.keys() - _KNOWN
    assert not strange, f"the code of `{title}` would need {sorted(strange)}"
    lines = [line for line in _DELETIONS.sub("", code.src).split("\n") if line.strip()]
    header = f'"""{title}\n\nWritten by ktc and sealed in `ktc.json`: once altered, it is refused.\n"""'
    imports = ["import torch", "from torch import device, inf, nan"]
    return "\n".join([header, "", *imports, "", "", *lines, ""])


class _Copy:
    """One graph copied into another that prints as a method of the block; folded regions are unfolded."""

    def __init__(
        self, graph: fx.Graph, source: fx.GraphModule, block: nn.Module, half: torch.dtype | None,
        given: dict[fx.Node, Any] | None = None, hidden: fx.Node | None = None,
    ) -> None:  # fmt: skip
        self._graph, self._source, self._block, self._half = graph, source, block, half
        self._values: dict[fx.Node, Any] = dict(given or {})
        self._hidden = hidden

    def result(self) -> Any:
        """Copy the nodes, and return the value of the output."""
        for node in nodes_of(self._source):
            if node.op == "output":
                return self._mapped(node.args[0])
            if node not in self._values:
                self._values[node] = self._copied(node)
        raise AssertionError("a graph has an output")

    def _copied(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            self._hidden = self._hidden or self._graph.placeholder("hidden_states")
            return self._hidden
        if node.op == "get_attr":
            return self._graph.create_node("get_attr", str(node.target), name=node.name)
        if node.op == "call_module" and str(node.target).startswith("folded."):
            return self._unfolded(node)
        if node.target is ops.transfer:
            return self._values[input_of(node, 0)]
        layer = self._layer(node)
        if layer is not None:
            return self._graph.create_node("call_module", layer, (self._values[input_of(node, 0)],), name=node.name)
        args, kwargs = self._mapped(node.args), self._mapped(node.kwargs)
        if ops.name_of(node) in _MAKERS and node.kwargs.get("device") is None:
            kwargs = {**kwargs, "device": self._property("device")}
        return self._graph.create_node(node.op, node.target, args, kwargs, name=node.name)

    def _unfolded(self, node: fx.Node) -> Any:
        inner = self._source.get_submodule(str(node.target))
        assert isinstance(inner, fx.GraphModule), f"`{node.target}` holds a region"
        places = (n for n in nodes_of(inner) if n.op == "placeholder")
        given = dict(zip(places, (self._values[i] for i in node.all_input_nodes), strict=True))
        return _Copy(self._graph, inner, self._block, self._half, given, self._hidden).result()

    def _layer(self, node: fx.Node) -> str | None:
        """Return the linear layer of the stock block that a node computes, if stock code calls the layer.

        Code that uses the weight of a layer without a call runs no hook and no adapter of it.
        """
        weight = node.args[1] if ops.name_of(node) == "linear" else None
        if not isinstance(weight, fx.Node) or weight.op != "get_attr":
            return None
        owner, _, leaf = str(weight.target).rpartition(".")
        if node.meta.get("called", owner) != owner:
            return None
        layer = self._block.get_submodule(owner)
        with_bias = ops.argument(node, "bias") is not None
        plain = type(layer).forward is nn.Linear.forward and leaf == "weight"
        return owner if plain and with_bias == (getattr(layer, "bias", None) is not None) else None

    def _mapped(self, argument: Any) -> Any:
        def leaf(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return self._values[value]
            return self._property("dtype") if self._half is not None and value is self._half else value

        return map_aggregate(argument, leaf)

    def _property(self, name: str) -> fx.Node:
        """`hidden_states.dtype` and the like."""
        return self._graph.call_function(getattr, (self._hidden, name))

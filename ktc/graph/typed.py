"""What torch leaves untyped of its graphs and modules, with its types: nodes, their inputs, their meta tensors.

In: torch.fx graphs and modules. Out: plain lists and values. An input that is no node is a bug of the caller.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from torch import Tensor, fx, nn


def nodes_of(graph_module: fx.GraphModule) -> list[fx.Node]:
    """The nodes of a graph in order; the list does not change while the graph does."""
    return list(cast("Iterator[fx.Node]", iter(graph_module.graph.nodes)))


def nodes_by_name(graph_module: fx.GraphModule) -> dict[str, fx.Node]:
    """The nodes of a graph in order, by the names that matches and plans hold."""
    return {node.name: node for node in nodes_of(graph_module)}


def input_names(graph_module: fx.GraphModule) -> list[str]:
    """The names of the graph's placeholders, in the order in which it takes them."""
    return [node.name for node in nodes_of(graph_module) if node.op == "placeholder"]


def input_of(node: fx.Node, position: int) -> fx.Node:
    """The positional argument of `node` at `position`, which must be a node."""
    argument = node.args[position]
    assert isinstance(argument, fx.Node), f"argument {position} of `{node.name}` is no node"
    return argument


def nodes_in(argument: object) -> list[fx.Node]:
    """The nodes of an argument that is a list, as that of `cat`."""
    items = cast("Sequence[object]", argument) if isinstance(argument, list | tuple) else ()
    return [item for item in items if isinstance(item, fx.Node)]


def tensor_of(node: fx.Node) -> Tensor | None:
    """The fake tensor that a node was captured with, None where its value is something else."""
    held = node.meta.get("val")
    return held if isinstance(held, Tensor) else None


def named_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module below `module`, itself included, by its FQN."""
    return list(cast("Iterator[tuple[str, nn.Module]]", module.named_modules()))


def owner_of(root: nn.Module, fqn: str) -> tuple[nn.Module, str]:
    """The module below `root` that owns the tensor `fqn`, and the tensor's name there."""
    owner, _, leaf = fqn.rpartition(".")
    return root.get_submodule(owner), leaf

"""Typed access to torch's untyped graphs and modules: nodes, their inputs, their meta tensors.

Input: torch.fx graphs and modules. Output: plain lists and values. An input that is not a node is a bug of the caller.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn


def nodes_of(graph_module: fx.GraphModule) -> list[fx.Node]:
    """Return a copy of a graph's nodes in order, so that the graph can change during iteration."""
    return list(cast("Iterator[fx.Node]", iter(graph_module.graph.nodes)))


def nodes_by_name(graph_module: fx.GraphModule) -> dict[str, fx.Node]:
    """Return the nodes of a graph in order, by the names used in matches and plans."""
    return {node.name: node for node in nodes_of(graph_module)}


def input_names(graph_module: fx.GraphModule) -> list[str]:
    return [node.name for node in nodes_of(graph_module) if node.op == "placeholder"]


def input_of(node: fx.Node, position: int) -> fx.Node:
    """Return the positional argument of `node` at `position`, which must be a node."""
    argument = node.args[position]
    assert isinstance(argument, fx.Node), f"argument {position} of `{node.name}` is not a node"
    return argument


def nodes_in(argument: object) -> list[fx.Node]:
    """Return the nodes in a list argument, such as that of `cat`."""
    items = cast("Sequence[object]", argument) if isinstance(argument, list | tuple) else ()
    return [item for item in items if isinstance(item, fx.Node)]


def tensor_of(node: fx.Node) -> Tensor | None:
    """Return the fake tensor that a node was captured with, None if its value is not a tensor."""
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None


def named_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every module below `module`, itself included, by its FQN."""
    return list(cast("Iterator[tuple[str, nn.Module]]", module.named_modules()))


def owner_of(root: nn.Module, fqn: str) -> tuple[nn.Module, str]:
    """Return the module below `root` that owns the tensor `fqn`, and the tensor's name there."""
    owner, _, leaf = fqn.rpartition(".")
    return root.get_submodule(owner), leaf


def attach_tensor(root: nn.Module, fqn: str, tensor: Tensor) -> None:
    """Register a parameter or a buffer at `fqn` below `root`, and the modules that are missing on the way."""
    module = root
    *owners, leaf = fqn.split(".")
    for owner in owners:
        if not hasattr(module, owner):
            module.add_module(owner, nn.Module())
        module = module.get_submodule(owner)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(leaf, tensor)
    else:
        module.register_buffer(leaf, tensor)


def traced_size(size: int | torch.SymInt) -> int:
    """Return a size, of a symbolic one the value that it was traced with, without a guard on it."""
    return int(cast("Any", size.node).hint) if isinstance(size, torch.SymInt) else int(size)


_DTYPES = {
    "bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64", "float8_e4m3fn": "fp8", "int64": "i64",
    "complex64": "c64",
}  # fmt: skip


def dtype_name(dtype: object) -> str:
    """Return the short name of a dtype: `torch.bfloat16` -> `bf16`."""
    plain = str(dtype).removeprefix("torch.")
    return _DTYPES.get(plain, plain)

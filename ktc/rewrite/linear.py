"""`lora_linear` and `kt_linear`: a linear node becomes a call of `KTLinear` at the module's own FQN.

`KTLinear` is an `nn.Linear` with the same weight, so PEFT adapts it and the checkpoint's names stay. A node that one
rule gives an adapter and another a kernel becomes one module; in a graph it stands without a kernel.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import fx, nn

from ktc.graph import ops
from ktc.graph.typed import nodes_by_name
from ktc.linears.lora_linear import KTLinear
from ktc.plan import BlockRewrite, NodeAction

TARGETS: Final = ("kt_linear", "lora_linear")


def apply(graph: fx.GraphModule, rewrite: BlockRewrite) -> None:
    """Replaces the linear nodes that actions of these two targets name."""
    nodes = nodes_by_name(graph)
    held: dict[str, list[NodeAction]] = {}
    for action in rewrite.actions:
        if action.target in TARGETS:
            held.setdefault(action.node, []).append(action)
    for name, actions in held.items():
        _replace(graph, nodes[name], sorted(actions, key=lambda action: TARGETS.index(action.target)))


def _replace(graph: fx.GraphModule, node: fx.Node, actions: list[NodeAction]) -> None:
    first = actions[0]
    weight, bias = graph.get_parameter(f"{first.fqn}.weight"), ops.argument(node, "bias")
    with torch.device("meta"):
        linear = KTLinear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    linear.weight = nn.Parameter(weight.detach())
    if bias is not None:
        linear.bias = nn.Parameter(graph.get_parameter(f"{first.fqn}.bias").detach())
    graph.set_submodule(first.fqn, linear)
    with graph.graph.inserting_before(node):
        call = graph.graph.call_module(first.fqn, node.args[:1])
    call.meta = {**node.meta, "op": first.target, "attributes": ops.attributes(node), "fqn": first.fqn}
    call.meta |= {
        "rule": ", ".join(dict.fromkeys(action.rule for action in actions)),
        "span": ", ".join(dict.fromkeys(str(action.span) for action in actions)),
    }
    if first.target == "kt_linear":
        call.meta["kernel"] = first.linear.entry if first.linear else str(first.settings["kernel"])
    node.replace_all_uses_with(call)
    graph.graph.erase_node(node)

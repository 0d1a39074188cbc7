"""`lora_linear`: a linear node becomes a call of `KTLinear` at the module's own FQN.

`KTLinear` is an `nn.Linear` with the same weight, so PEFT adapts it and the checkpoint's names stay.
"""

from __future__ import annotations

import torch
from torch import fx, nn

from ktc.graph import ops
from ktc.graph.typed import nodes_by_name
from ktc.plan import BlockRewrite
from ktc.runtime.lora_linear import KTLinear


def apply(graph: fx.GraphModule, rewrite: BlockRewrite) -> None:
    """Replaces the linear nodes that `lora_linear` actions name."""
    nodes = nodes_by_name(graph)
    for action in rewrite.actions:
        if action.target != "lora_linear":
            continue
        node = nodes[action.node]
        weight, bias = graph.get_parameter(f"{action.fqn}.weight"), ops.argument(node, "bias")
        with torch.device("meta"):
            linear = KTLinear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
        linear.weight = nn.Parameter(weight.detach())
        if bias is not None:
            linear.bias = nn.Parameter(graph.get_parameter(f"{action.fqn}.bias").detach())
        attributes = ops.attributes(node)
        graph.set_submodule(action.fqn, linear)
        with graph.graph.inserting_before(node):
            call = graph.graph.call_module(action.fqn, node.args[:1])
        call.meta = {**node.meta, "op": "lora_linear", "attributes": attributes, "fqn": action.fqn}
        call.meta |= {"rule": action.rule, "span": str(action.span)}
        node.replace_all_uses_with(call)
        graph.graph.erase_node(node)

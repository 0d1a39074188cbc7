"""`fused_moe` (the rule target `cpu_moe`): the experts node becomes one call of the `FusedMoe` module at its FQN.

In a graph the module stands without a kernel: its PyTorch reference, which proofs run and kernels are tested against.
"""

from __future__ import annotations

import torch
from torch import fx

from ktc.experts.module import FusedMoe
from ktc.graph import ops
from ktc.graph.typed import nodes_by_name
from ktc.plan import BlockRewrite


def apply(graph: fx.GraphModule, rewrite: BlockRewrite) -> None:
    """Replaces the experts nodes that `cpu_moe` actions name. The new module has no weights yet."""
    nodes = nodes_by_name(graph)
    for action in rewrite.actions:
        if action.target != "cpu_moe":
            continue
        assert action.kernel is not None, "the plan chooses a kernel for every cpu_moe"
        node = nodes[action.node]
        attributes = ops.attributes(node)
        top_k = int(ops.shape_of(node.args[1])[-1])
        dtype = node.meta["val"].dtype
        with torch.device("meta"):
            module = FusedMoe(
                int(attributes["num_experts"]), int(attributes["hidden"]), int(attributes["inter"]), top_k,
                str(attributes["form"]), dtype=dtype,
            )  # fmt: skip
        graph.set_submodule(action.fqn, module)
        with graph.graph.inserting_before(node):
            call = graph.graph.call_module(action.fqn, node.args[:3])
        call.meta = {**node.meta, "op": "cpu_moe", "attributes": attributes, "fqn": action.fqn}
        call.meta |= {"rule": action.rule, "span": str(action.span), "kernel": action.kernel.entry}
        node.replace_all_uses_with(call)
        graph.graph.erase_node(node)

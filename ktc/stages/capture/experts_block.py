"""Experts that a layer calls itself, next to their router: the block is the experts module.

The compiled model replaces the whole block, so it may compute nothing else. Input: the graph of such a block in normal
form. Output: the reason why the block must stay as it is, empty if there is none.
"""

from __future__ import annotations

from torch import fx

from ktc.model.graph import ops
from ktc.model.graph.typed import nodes_in, nodes_of

# The inputs as a layer may pass them: by position, or by the names that every experts module of transformers has.
_NAMES = (("hidden_states",), ("input_1", "top_k_index"), ("input_2", "top_k_weights"))


def more_than_experts(graph: fx.GraphModule, *, named: bool) -> str:
    """Return what a block does besides computing its experts from its three inputs.

    `named`: the module that replaces it takes the inputs by any name.
    """
    nodes = nodes_of(graph)
    called = [node for node in nodes if node.op not in ("placeholder", "get_attr", "output")]
    if [node.target for node in called] != [ops.experts]:
        others = (ops.operator(node) for node in called if node.target is not ops.experts)
        return f"it does more than call its experts: `{next(others, ops.experts.__name__)}`"
    if nodes_in(nodes[-1].args) != called:
        return "it returns more than the result of its experts"
    for place, names in enumerate(_NAMES):
        given = called[0].args[place]
        if not isinstance(given, fx.Node) or given.op != "placeholder" or not (named or str(given.target) in names):
            return f"its experts do not get `{names[-1]}` as the layer gives it"
    return ""

"""Rotary embedding in any formulation: each region that mixes a value with the position becomes one node.

The pass has no family's formula. A region is found by its inputs: exactly one value from the hidden states, and values
from the other inputs (cosines, sines, complex frequencies).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, fx

from ktc.model.graph import ops
from ktc.model.graph.fold import fold, tensor_inputs
from ktc.model.graph.typed import input_of, nodes_of, tensor_of

DATA_INPUT = "hidden_states"


def fold_rope(graph_module: fx.GraphModule) -> None:
    """Fold, between a projection and the core's q or k, the largest regions that mix one value with the position."""
    data = _reach(graph_module, lambda node: node.name == DATA_INPUT)
    position = _reach(graph_module, lambda node: node.name != DATA_INPUT)
    mixed = data & position
    for core in [n for n in nodes_of(graph_module) if ops.operator(n) == "sdpa"]:
        query_and_key = dict.fromkeys((input_of(core, 0), input_of(core, 1)))
        if core in mixed and any(node in mixed for node in query_and_key):
            for target in query_and_key:
                _fold_mixed(graph_module, target, data, mixed)


def _reach(graph_module: fx.GraphModule, starts: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Return the nodes that data reaches from the inputs and counters that `starts` picks; sizes carry no data."""
    reached: set[fx.Node] = set()
    for node in nodes_of(graph_module):
        counts = node.op == "placeholder" or ops.operator(node) == "arange"
        begins = starts(node) if counts else any(i in reached for i in tensor_inputs(node))
        if begins and isinstance(node.meta.get("val"), Tensor | tuple | list):
            reached.add(node)
    return reached


def _fold_mixed(graph_module: fx.GraphModule, target: fx.Node, data: set[fx.Node], mixed: set[fx.Node]) -> None:
    if target not in mixed or ops.operator(target) == "rope":
        return
    region = _single_value_region(graph_module, target, data, mixed)
    if region is not None:
        fold(graph_module, region[0], target, region[1], "rope")
        return
    for source in list(tensor_inputs(target)):
        _fold_mixed(graph_module, source, data, mixed)


def _single_value_region(
    graph_module: fx.GraphModule, target: fx.Node, data: set[fx.Node], mixed: set[fx.Node]
) -> tuple[set[fx.Node], fx.Node] | None:
    """Return the region below `target` that depends on data through exactly one value, and that value, if any."""
    order = {node: i for i, node in enumerate(nodes_of(graph_module))}
    region, frontier, todo = set[fx.Node](), set[fx.Node](), [target]
    while todo:
        node = todo.pop()
        if node in region:
            continue
        region.add(node)
        for source in tensor_inputs(node):
            if source in mixed:
                todo.append(source)
            elif source in data:
                frontier.add(source)
    # Grow upwards from the latest value until one tensor is left that a pattern can name: the nearest value that all
    # data passes through. The nodes above it only prepare the rotation (`view_as_complex`, a scale).
    while len(frontier) > 1 or any(_prepares(node, region) for node in frontier):
        latest = max(frontier, key=order.__getitem__)
        sources = [s for s in tensor_inputs(latest) if s in data]
        if not sources:
            return None
        frontier.remove(latest)
        region.add(latest)
        frontier.update(sources)
    holds_weights = any(i.op == "get_attr" for n in region for i in n.all_input_nodes)
    escapes = any(user not in region for n in region if n is not target for user in n.users)
    semantic = any(ops.operator(n) in ("rms_norm", "linear", "sdpa") for n in region)
    if holds_weights or escapes or semantic or not frontier:
        return None
    return region, frontier.pop()


def _prepares(node: fx.Node, region: set[fx.Node]) -> bool:
    """Return whether `node` is a step towards the rotation used by `region` alone, and not a value of a pattern."""
    if tensor_of(node) is None:
        return True
    named = ops.operator(node) in ops.TRANSPARENT or ops.operator(node) in ("linear", "rms_norm", "getitem", "input")
    return not named and set(node.users) <= region

"""Normal form: equivalent ways to write one computation become the same nodes.

A tuple of passes over a block's graph, each leaving it runnable. Slices written into an empty tensor become `cat`,
RMSNorm and rotary embedding become single nodes, and every node gets its operator name and shape. A change here changes
the input of all patterns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import fx

from ktc.model.graph import ops
from ktc.model.graph.fold import fold
from ktc.model.graph.typed import dtype_name, input_of, nodes_of, tensor_of
from ktc.stages.capture.export import BATCH, SEQUENCE
from ktc.stages.capture.rope import fold_rope

_LAST = 1 << 62  # torch represents "to the end" as the largest int64


def normalise(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Bring a captured graph into normal form, in place, and return it."""
    for to_normal_form in (_drop_whole_slices, _cat_from_copies, _fold_rms_norm, fold_rope, _describe):
        to_normal_form(graph_module)
        graph_module.graph.eliminate_dead_code()
    graph_module.graph.lint()
    graph_module.recompile()
    return graph_module


def _drop_whole_slices(graph_module: fx.GraphModule) -> None:
    """Remove slices that take a whole dimension: `x[:, None]` has one."""
    for node in nodes_of(graph_module):
        if ops.name_of(node) == "slice":
            start, end = ops.argument(node, "start"), ops.argument(node, "end")
            whole = start in (None, 0) and (end is None or (isinstance(end, int) and end >= _LAST))
            if whole and ops.argument(node, "step", 1) == 1:
                node.replace_all_uses_with(input_of(node, 0))
                graph_module.graph.erase_node(node)


# cat -----------------------------------------------------------------------------------------------------------------
def _cat_from_copies(graph_module: fx.GraphModule) -> None:
    """Replace `empty` and a chain of `slice_scatter` that fills it along one dimension by `cat`."""
    graph = graph_module.graph
    for node in reversed(nodes_of(graph_module)):
        if ops.name_of(node) != "slice_scatter" or any(ops.name_of(u) == "slice_scatter" for u in node.users):
            continue
        pieces = _written_pieces(node)
        if pieces is None:
            continue
        dim, values = pieces
        with graph.inserting_before(node):
            joined = graph.call_function(torch.ops.aten.cat.default, (values, dim))
        joined.meta = dict(node.meta)
        node.replace_all_uses_with(joined)


def _written_pieces(node: fx.Node) -> tuple[int, list[fx.Node]] | None:
    """Return the dimension along which a chain of slices fills an empty tensor, and the values; None if incomplete."""
    dims, pieces, target = set[int](), list[tuple[int, int, fx.Node]](), node
    while ops.name_of(target) == "slice_scatter":
        base, source = target.args[0], target.args[1]
        if not isinstance(base, fx.Node) or not isinstance(source, fx.Node):
            return None
        dims.add(int(ops.argument(target, "dim", 0)))
        start = ops.argument(target, "start") or 0
        end = ops.argument(target, "end")
        pieces.append((int(start), _LAST if end is None else int(end), _copied(source)))
        target = base
    if ops.name_of(target) not in ("empty", "new_empty", "empty_like") or len(dims) != 1:
        return None
    dim, pieces = dims.pop(), sorted(pieces, key=lambda piece: piece[0])
    width, reached = ops.shape_of(node)[dim], 0
    for start, end, value in pieces:
        if start != reached or ops.shape_of(value)[dim] != min(end, width) - start:
            return None
        reached = min(end, width)
    return (dim, [value for *_, value in pieces]) if reached == width else None


def _copied(node: fx.Node) -> fx.Node:
    """Return the value written by `copy(slice, value)`."""
    return input_of(node, 1) if ops.name_of(node) == "copy" else node


# rms_norm ------------------------------------------------------------------------------------------------------------
def _fold_rms_norm(graph_module: fx.GraphModule) -> None:
    """Fold x * rsqrt(mean(x^2) + eps), the casts around it, and the multiplication by the weight."""
    for rsqrt in [n for n in nodes_of(graph_module) if _is_reciprocal_root(n)]:
        norm = _rms_norm_region(rsqrt)
        if norm is None:
            continue
        region, value, result, eps = norm
        fold(graph_module, region, result, value, "rms_norm").meta["eps"] = eps


def _rms_norm_region(rsqrt: fx.Node) -> tuple[set[fx.Node], fx.Node, fx.Node, float] | None:
    """Return the nodes of the norm around `rsqrt`, its input, its result and its epsilon; None if it is not a norm."""
    biased = rsqrt.args[0]
    if not isinstance(biased, fx.Node) or ops.name_of(biased) != "add" or not isinstance(biased.args[1], float):
        return None
    mean, eps = biased.args[0], biased.args[1]
    if not isinstance(mean, fx.Node) or ops.name_of(mean) != "mean" or not ops.works_along(mean, -1):
        return None
    square, scaled = mean.args[0], _only_user(rsqrt)
    if not isinstance(square, fx.Node) or not _is_square(square) or scaled is None or ops.name_of(scaled) != "mul":
        return None
    wide = square.args[0]
    if not isinstance(wide, fx.Node) or {wide, rsqrt} != set(scaled.args):
        return None
    region, result = {square, mean, biased, rsqrt, scaled}, scaled
    value = wide
    if ops.name_of(wide) == "cast" and set(wide.users) <= region:
        region.add(wide)
        value = input_of(wide, 0)
    while (user := _only_user(result)) is not None:
        if ops.name_of(user) != "cast" and not (ops.name_of(user) == "mul" and _has_weight_operand(user, result)):
            break
        region |= {user, *(n for n in user.all_input_nodes if _is_weight(n) and n.op != "get_attr")}
        result = user
    return region, value, result, eps


def _is_reciprocal_root(node: fx.Node) -> bool:
    return ops.name_of(node) == "rsqrt" or (ops.name_of(node) == "pow" and bool(node.args[1] == -0.5))


def _is_square(node: fx.Node) -> bool:
    if ops.name_of(node) == "mul":
        return node.args[0] is node.args[1]
    return ops.name_of(node) == "pow" and bool(node.args[1] == 2)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_weight(node: object) -> bool:
    """Return whether a node is a parameter, seen through casts and `1 + weight`, each with this use only."""
    if not isinstance(node, fx.Node):
        return False
    if node.op == "get_attr":
        return True
    plain = ops.name_of(node) in ("cast", "add") and len(node.users) == 1
    return plain and all(_is_weight(i) for i in node.all_input_nodes) and bool(node.all_input_nodes)


def _has_weight_operand(node: fx.Node, other: fx.Node) -> bool:
    return any(_is_weight(a) for a in node.args if a is not other)


# names and shapes ----------------------------------------------------------------------------------------------------
def _describe(graph_module: fx.GraphModule) -> None:
    """Write operator, shape, dtype and FQN into every node's `meta`."""
    symbols = _symbol_names(nodes_of(graph_module))
    for node in nodes_of(graph_module):
        node.meta.setdefault("op", ops.name_of(node))
        tensor = tensor_of(node)
        if tensor is not None:
            node.meta["shape"] = tuple(_size(size, symbols) for size in tensor.shape)
            node.meta["dtype"] = dtype_name(tensor.dtype)
        if node.op == "get_attr":
            node.meta["fqn"] = str(node.target)
        elif node.meta["op"] in ("linear", "experts", "rms_norm", "embedding"):
            behind = (source for node_input in node.all_input_nodes for source in node_input.all_input_nodes)
            weight = next((n for n in (*node.all_input_nodes, *behind) if n.op == "get_attr"), None)
            if weight is not None:
                node.meta["fqn"] = str(weight.target).rpartition(".")[0]


def _symbol_names(nodes: Iterable[fx.Node]) -> dict[str, str]:
    """Map symbols of the exported program to the sizes they were traced with: b (batch), s (sequence), t (tokens)."""
    letters, names = {BATCH: "b", SEQUENCE: "s", BATCH * SEQUENCE: "t"}, dict[str, str]()
    for node in nodes:
        for size in ops.shape_of(node):
            if isinstance(size, torch.SymInt) and _symbolic(size).expr.is_symbol:
                symbol, traced_with = str(_symbolic(size).expr), _symbolic(size).hint
                names.setdefault(symbol, letters.get(traced_with, symbol))
    return names


def _size(size: int | torch.SymInt, symbols: dict[str, str]) -> int | str:
    if isinstance(size, int):
        return size
    expression = _symbolic(size).expr
    return str(expression.subs({s: symbols.get(str(s), str(s)) for s in expression.free_symbols}))


def _symbolic(size: torch.SymInt) -> Any:
    """Return torch's record of a symbolic size: `expr`, a sympy expression, and `hint`, the traced value."""
    return cast("Any", size.node)

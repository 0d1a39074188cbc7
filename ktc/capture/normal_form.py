"""Normal form: the spellings of one computation become one.

A tuple of passes over a block's graph, each leaving it runnable: slices written into an empty tensor become `cat`,
RMSNorm and rotary embedding become single nodes, every node gets its operator name and shape.
Versioned: a change here changes what patterns see.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, fx

from ktc.capture.types import dtype_name
from ktc.graph import ops
from ktc.graph.fold import fold, tensor_inputs

VERSION = 1
_LAST = 1 << 62  # torch writes "to the end" as the largest int64


def normalise(graph_module: fx.GraphModule, data_input: str = "hidden_states") -> fx.GraphModule:
    """Brings a captured graph into normal form, in place, and returns it."""
    for name_pass in (_cat_from_copies, _fold_rms_norm, lambda g: _fold_rope(g, data_input), _describe):
        name_pass(graph_module)
        graph_module.graph.eliminate_dead_code()
    graph_module.graph.lint()
    graph_module.recompile()
    return graph_module


# cat -----------------------------------------------------------------------------------------------------------------
def _cat_from_copies(graph_module: fx.GraphModule) -> None:
    """`empty`, then one `slice_scatter` after another that fills it completely along one dimension -> `cat`."""
    graph = graph_module.graph
    for node in reversed(list(graph.nodes)):
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
    dims, pieces, target = set[int](), list[tuple[int, int, fx.Node]](), node
    while ops.name_of(target) == "slice_scatter":
        base, source = target.args[0], target.args[1]
        if not isinstance(base, fx.Node) or not isinstance(source, fx.Node):
            return None
        dims.add(int(ops.argument(target, "dim", 0)))  # type: ignore[arg-type]
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
    """The value that `copy(slice, value)` writes."""
    return node.args[1] if ops.name_of(node) == "copy" else node  # type: ignore[return-value]


# rms_norm ------------------------------------------------------------------------------------------------------------
def _fold_rms_norm(graph_module: fx.GraphModule) -> None:
    """x * rsqrt(mean(x^2) + eps), casts around it, and the weight multiplied onto it."""
    for rsqrt in [n for n in graph_module.graph.nodes if ops.name_of(n) == "rsqrt"]:
        found = _rms_norm_region(rsqrt)
        if found is None:
            continue
        region, value, result, eps = found
        fold(graph_module, region, result, value, "rms_norm").meta["eps"] = eps


def _rms_norm_region(rsqrt: fx.Node) -> tuple[set[fx.Node], fx.Node, fx.Node, float] | None:
    biased = rsqrt.args[0]
    if not isinstance(biased, fx.Node) or ops.name_of(biased) != "add" or not isinstance(biased.args[1], float):
        return None
    mean = biased.args[0]
    if not isinstance(mean, fx.Node) or ops.name_of(mean) != "mean" or not ops.works_along(mean, -1):
        return None
    square = mean.args[0]
    if not isinstance(square, fx.Node):
        return None
    is_square = (ops.name_of(square) == "pow" and square.args[1] == 2) or (ops.name_of(square) == "mul" and square.args[0] is square.args[1])
    scaled = _only_user(rsqrt)
    if not is_square or scaled is None or ops.name_of(scaled) != "mul":
        return None
    wide = square.args[0]
    if not isinstance(wide, fx.Node) or {wide, rsqrt} != set(scaled.args):
        return None
    region, result = {square, mean, biased, rsqrt, scaled}, scaled
    value = wide
    if ops.name_of(wide) == "cast" and set(wide.users) <= region:
        region.add(wide)
        value = wide.args[0]
    while (user := _only_user(result)) is not None:
        if ops.name_of(user) == "cast" or (ops.name_of(user) == "mul" and _has_weight_operand(user, result)):
            region.add(user)
            region |= {n for n in user.all_input_nodes if _is_weight(n) and n.op != "get_attr"}
            result = user
            continue
        break
    return region, value, result, biased.args[1]  # type: ignore[return-value]


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_weight(node: object) -> bool:
    """A parameter, seen through casts and `1 + weight`, each used here alone."""
    if not isinstance(node, fx.Node):
        return False
    if node.op == "get_attr":
        return True
    plain = ops.name_of(node) in ("cast", "add") and len(node.users) == 1
    return plain and all(_is_weight(i) for i in node.all_input_nodes) and bool(node.all_input_nodes)


def _has_weight_operand(node: fx.Node, other: fx.Node) -> bool:
    return any(_is_weight(a) for a in node.args if a is not other)


# rope ----------------------------------------------------------------------------------------------------------------
def _fold_rope(graph_module: fx.GraphModule, data_input: str) -> None:
    """Between a projection and the core's q or k, the largest regions that mix one value with the position."""
    graph = graph_module.graph
    data, position = _reach(graph, lambda n: n.name == data_input), _reach(graph, lambda n: n.name != data_input)
    mixed = data & position
    for core in [n for n in graph.nodes if ops.operator(n) == "sdpa"]:
        if core in mixed and any(isinstance(a, fx.Node) and a in mixed for a in core.args[:2]):
            for target in dict.fromkeys(core.args[:2]):
                _fold_mixed(graph_module, target, data, mixed)  # type: ignore[arg-type]


def _reach(graph: fx.Graph, starts: object) -> set[fx.Node]:
    """Nodes that data flows to from the inputs that `starts` picks; sizes carry no data."""
    reached: set[fx.Node] = set()
    for node in graph.nodes:
        begins = node.op == "placeholder" and starts(node)  # type: ignore[operator]
        if begins or (node.op != "placeholder" and any(i in reached for i in tensor_inputs(node))):
            if isinstance(node.meta.get("val"), Tensor | tuple | list):
                reached.add(node)
    return reached


def _fold_mixed(graph_module: fx.GraphModule, target: fx.Node, data: set[fx.Node], mixed: set[fx.Node]) -> None:
    if target not in mixed or ops.operator(target) == "rope":
        return
    region = _single_value_region(graph_module.graph, target, data, mixed)
    if region is not None:
        fold(graph_module, region[0], target, region[1], "rope")
        return
    for source in list(tensor_inputs(target)):
        _fold_mixed(graph_module, source, data, mixed)


def _single_value_region(
    graph: fx.Graph, target: fx.Node, data: set[fx.Node], mixed: set[fx.Node]
) -> tuple[set[fx.Node], fx.Node] | None:
    """The region below `target` that depends on data through exactly one value, and that value; None if there is none."""
    order = {node: i for i, node in enumerate(graph.nodes)}
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
    # Grow upwards from the latest value until a single tensor is left that a pattern can name: the nearest value that
    # all data passes through, and above it what only prepares the rotation (`view_as_complex`, a scale).
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
    if not isinstance(node.meta.get("val"), Tensor):
        return True
    named = ops.operator(node) in ops.TRANSPARENT or ops.operator(node) in ("linear", "rms_norm", "getitem", "input")
    return not named and set(node.users) <= region


# names and shapes ----------------------------------------------------------------------------------------------------
def _describe(graph_module: fx.GraphModule) -> None:
    """Writes operator, shape, dtype and FQN into every node's `meta`."""
    symbols = _symbol_names(graph_module.graph.nodes)
    for node in graph_module.graph.nodes:
        node.meta.setdefault("op", ops.name_of(node))
        held = node.meta.get("val")
        if isinstance(held, Tensor):
            node.meta["shape"] = tuple(_size(size, symbols) for size in held.shape)
            node.meta["dtype"] = dtype_name(held.dtype)
        if node.op == "get_attr":
            node.meta["fqn"] = str(node.target)
        elif node.meta["op"] in ("linear", "experts", "rms_norm", "embedding"):
            weight = next((n for n in node.all_input_nodes if n.op == "get_attr"), None)
            weight = weight or next((w for n in node.all_input_nodes for w in n.all_input_nodes if w.op == "get_attr"), None)
            if weight is not None:
                node.meta["fqn"] = str(weight.target).rpartition(".")[0]


def _symbol_names(nodes: Iterable[fx.Node]) -> dict[str, str]:
    """Symbols of the exported program by what they were traced with: b (batch), s (sequence), t (tokens)."""
    from ktc.capture.export import BATCH, SEQUENCE

    letters, names = {BATCH: "b", SEQUENCE: "s", BATCH * SEQUENCE: "t"}, dict[str, str]()
    for node in nodes:
        held = node.meta.get("val")
        for size in held.shape if isinstance(held, Tensor) else ():
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                names.setdefault(str(size.node.expr), letters.get(size.node.hint, str(size.node.expr)))
    return names


def _size(size: int | torch.SymInt, symbols: dict[str, str]) -> int | str:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return str(expression.subs({s: symbols.get(str(s), str(s)) for s in expression.free_symbols}))

"""Replace a loop over experts by one `experts` node in the graph of a block that ran under `all_experts_routed`.

The pass works for any way to write the loop. It finds four values: the sum of the experts' results, and the hidden
states, expert indices and weights on which alone the sum depends. One `experts` node replaces the nodes between these
three inputs and the sum. The proof checks on data that the block's own code computes the same.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from ktc.model.experts.layouts.stock_layout import stock_names, stock_shape
from ktc.model.graph import ops
from ktc.model.graph.fold import tensor_inputs
from ktc.model.graph.typed import attach_tensor, nodes_of, tensor_of
from ktc.model.kernels.form import parse_form
from ktc.stages.capture.types import ExpertList

# The operators of a loop that adds up experts' results: it moves rows, weights and adds them.
_SUMS = frozenset({
    "expert", "index", "index_select", "index_put", "index_add", "index_copy", "gather", "scatter", "scatter_add",
    "scatter_reduce", "slice_scatter", "select_scatter", "select", "slice", "split", "unbind", "cat", "stack", "copy",
    "mul", "add", "sum", "matmul", "where", "masked_fill", "repeat_interleave", "getitem",
    "zeros", "zeros_like", "new_zeros", "empty", "empty_like", "empty_permuted", "new_empty", "full", "full_like",
    "scalar_tensor",
})  # fmt: skip
_OF_DATA = {"picked": "the rows that a mask picks", "counted": "the number of tokens of each expert"}
_CONSTANTS = "constants."  # where capture keeps tensors that are no weights


class NoExperts(Exception):
    """The graph has no region that `experts` can replace; the message names the missing part."""


def canonicalise(graph_module: fx.GraphModule, experts: ExpertList) -> None:
    """Replace the loop over `experts`, in place. Raises NoExperts."""
    region = _region(graph_module, experts)
    graph, root = graph_module.graph, graph_module
    stacked = _stacks(experts, next(root.parameters()).dtype)
    for name, tensor in stacked.items():
        attach_tensor(root, f"{experts.fqn}.{name}", tensor)
    with graph.inserting_before(region.result):
        weights = [graph.get_attr(f"{experts.fqn}.{name}") for name in stacked]
        for node, tensor in zip(weights, stacked.values(), strict=True):
            node.meta["val"] = tensor
        hidden = _as_rows(graph, region.hidden)
        indices = _as_columns(graph, _cast(graph, region.indices, torch.long))
        scales = _as_columns(graph, region.weights)
        operands = (hidden, indices, scales, *weights[:2], experts.form, *(weights[2:] or (None, None)))
        called = graph.call_function(ops.experts, operands)
        called.meta["val"] = hidden.meta["val"]
        result = _shaped_as(graph, _cast(graph, called, _tensor(region.result).dtype), region.result)
    region.result.replace_all_uses_with(result)
    graph.eliminate_dead_code()
    left = next((node for node in nodes_of(root) if "ktc_unrolled" in str(node.target)), None)
    if left is not None:
        data = _OF_DATA.get(ops.name_of(left), f"`{ops.name_of(left)}`")
        raise NoExperts(f"it computes with {data}, which depends on data, outside of its loop over experts")
    graph_module.delete_all_unused_submodules()
    graph.lint()


@dataclass(frozen=True, slots=True)
class _Region:
    """The four values; the first three do not depend on the experts' results."""

    hidden: fx.Node
    indices: fx.Node
    weights: fx.Node
    result: fx.Node


def _region(graph_module: fx.GraphModule, experts: ExpertList) -> _Region:
    nodes = nodes_of(graph_module)
    markers = [node for node in nodes if ops.name_of(node) == "expert"]
    if not markers:
        raise NoExperts(f"nothing calls the modules of `{experts.fqn}`")
    tokens = _tensor(next(node for node in nodes if node.op == "placeholder")).shape[:-1]
    inside = _reached(markers)
    results = [node for node in nodes if node in inside and _is_hidden(node, tokens, experts.hidden)]
    through = [node for node in results if _all_pass(markers, node, nodes[-1])]
    if not through:
        raise NoExperts(f"the results of the modules of `{experts.fqn}` are not added up to hidden states")
    regions = (_cut(node, [n for n in nodes if n not in inside], tokens, experts) for node in through)
    region = next((region for region in regions if region is not None), None)
    if region is None:
        raise NoExperts(f"the code around `{experts.fqn}` does more with hidden states than routing and weighting")
    cut = frozenset({region.hidden, region.indices, region.weights})
    if any(region.weights in _behind(node, cut) for marker in markers for node in tensor_inputs(marker)):
        raise NoExperts(f"the routing weights enter the modules of `{experts.fqn}` instead of scaling their results")
    _require_sums(result=region.result, cut=cut)
    _require_unread(result=region.result, cut=cut, results=inside)
    return region


def _require_sums(result: fx.Node, cut: frozenset[fx.Node]) -> None:
    """Require that what is replaced moves, weights and adds the experts' results and does nothing else to them."""
    for node in _behind(result, cut) - cut:
        tensor = tensor_of(node)
        if tensor is None or not tensor.is_floating_point() or node.op != "call_function":
            continue
        name = ops.name_of(node)
        neutral = {"add": 0, "mul": 1}.get(name)  # Python's `sum` begins with 0
        scalars = [a for a in node.args if isinstance(a, int | float) and a != neutral]
        changed = name in ("add", "mul") and (scalars or ops.argument(node, "alpha", 1) != 1)
        if name not in _SUMS | ops.TRANSPARENT or name == "dropout" or changed:
            raise NoExperts(f"its loop over experts computes `{name}{f' {scalars[0]}' if scalars else ''}` too")


def _require_unread(result: fx.Node, cut: frozenset[fx.Node], results: set[fx.Node]) -> None:
    """Require that no condition depends on the experts' results: `nan_to_num` is a `where` of such conditions."""
    for node in _behind(result, cut) & results:
        tensor = tensor_of(node)
        if tensor is not None and not tensor.is_floating_point():
            raise NoExperts(f"its loop over experts reads the values of their results: `{ops.name_of(node)}`")


def _cut(result: fx.Node, outside: Sequence[fx.Node], tokens: Sequence[Any], experts: ExpertList) -> _Region | None:
    """Return the values that `result` depends on: the earliest indices, the latest weights and hidden states."""
    behind = _behind(result, stop=frozenset())
    before = [node for node in outside if node in behind and tensor_of(node) is not None]
    hidden = [node for node in before if _is_hidden(node, tokens, experts.hidden)]
    numbers = [node for node in before if _is_choice(node, tokens, experts.count, floating=False)]
    weights = [node for node in before if _is_choice(node, tokens, experts.count, floating=True)]
    for index in numbers:
        fitting = [w for w in weights if _same(_tensor(w).shape, _tensor(index).shape)]
        weight = _latest(fitting, result, {index}, hidden)
        state = None if weight is None else _latest(hidden, result, {index, weight}, ())
        if weight is not None and state is not None:
            return _Region(state, index, weight, result)
    return None


def _latest(
    choices: Sequence[fx.Node], result: fx.Node, known: set[fx.Node], others: Sequence[fx.Node]
) -> fx.Node | None:
    """Return the last of `choices` that separates the result, together with the known part of the cut.

    The remaining candidates of the cut are included in the separation.
    """
    for node in reversed(choices):
        if _separates(result, {node, *known, *others}, {node, *known}):
            return node
    return None


def _separates(result: fx.Node, cut: set[fx.Node], needed: set[fx.Node]) -> bool:
    """Return whether `result` depends on the `cut` alone, and on each of the `needed`."""
    behind = _behind(result, stop=frozenset(cut))
    others = (node for node in behind - cut if node.op in ("placeholder", "get_attr"))
    return needed <= behind and all(str(node.target).startswith(_CONSTANTS) for node in others)


def _behind(node: fx.Node, stop: frozenset[fx.Node]) -> set[fx.Node]:
    """Return the nodes that `node` depends on, itself included, down to those of `stop`; sizes carry no data."""
    seen, todo = set[fx.Node](), [node]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += [] if node in stop else tensor_inputs(node)
    return seen


def _reached(starts: Iterable[fx.Node], without: fx.Node | None = None) -> set[fx.Node]:
    """Return the nodes that depend on `starts`, these included, along paths that avoid `without`."""
    seen, todo = set[fx.Node](), list(starts)
    while todo:
        node = todo.pop()
        if node not in seen and node is not without:
            seen.add(node)
            todo += [user for user in node.users if user.op == "output" or node in tensor_inputs(user)]
    return seen


def _all_pass(markers: Sequence[fx.Node], through: fx.Node, output: fx.Node) -> bool:
    return output not in _reached(markers, without=through)


def _tensor(node: fx.Node) -> Tensor:
    tensor = tensor_of(node)
    assert tensor is not None, f"`{node.name}` has no tensor"
    return tensor


def _is_hidden(node: fx.Node, tokens: Sequence[Any], width: int) -> bool:
    """Test for hidden states: (T, H) or the shape of the block's input, floating."""
    tensor = tensor_of(node)
    if tensor is None or not tensor.is_floating_point() or tensor.shape[-1:] != (width,):
        return False
    return _same(tensor.shape[:-1], [_product(tokens)]) or _same(tensor.shape[:-1], tokens)


def _is_choice(node: fx.Node, tokens: Sequence[Any], count: int, *, floating: bool) -> bool:
    """Test for routing: (T, K) with K at most the number of experts, of indices or of weights; (T,) for one expert."""
    tensor = tensor_of(node)
    if tensor is None or tensor.dim() not in (1, 2) or tensor.dtype == torch.bool:
        return False
    columns: Any = tensor.shape[1] if tensor.dim() == 2 else 1
    fits = tensor.is_floating_point() == floating and isinstance(columns, int) and columns <= count
    return fits and _same(tensor.shape[:1], [_product(tokens)])


def _product(sizes: Sequence[Any]) -> Any:
    return reduce(operator.mul, sizes)


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two shapes have the same text; comparing the symbols themselves would narrow them."""
    return [_spelled(size) for size in one] == [_spelled(size) for size in other]


def _spelled(size: Any) -> str:
    return str(cast("Any", size.node).expr) if isinstance(size, torch.SymInt) else str(size)


# new nodes -----------------------------------------------------------------------------------------------------------
def _as_rows(graph: fx.Graph, node: fx.Node) -> fx.Node:
    rows = _tensor(node).flatten(0, -2)
    return node if _tensor(node).dim() == 2 else _reshaped(graph, node, [-1, rows.shape[-1]], rows)


def _as_columns(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Return (T, 1) of the index or the weight of one expert for each token."""
    tensor = _tensor(node)
    return node if tensor.dim() == 2 else _reshaped(graph, node, [-1, 1], tensor.reshape(-1, 1))


def _shaped_as(graph: fx.Graph, node: fx.Node, like: fx.Node) -> fx.Node:
    wanted = _tensor(like)
    if wanted.dim() == 2:
        return node
    source = next(n for n in _behind(like, frozenset()) if n.op == "placeholder" and _tensor(n).dim() == wanted.dim())
    sizes: list[fx.Node | int] = []
    shape: list[Any] = list(wanted.shape)
    for dim, size in enumerate(shape):
        if isinstance(size, int):
            sizes.append(size)
            continue
        symbol = graph.call_function(torch.ops.aten.sym_size.int, (source, dim))
        symbol.meta["val"] = size
        sizes.append(symbol)
    return _reshaped(graph, node, sizes, wanted)


def _reshaped(graph: fx.Graph, node: fx.Node, sizes: Sequence[fx.Node | int], value: Tensor) -> fx.Node:
    reshaped = graph.call_function(torch.ops.aten.reshape.default, (node, list(sizes)))
    reshaped.meta["val"] = value
    return reshaped


def _cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    if _tensor(node).dtype == dtype:
        return node
    cast = graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})
    cast.meta["val"] = _tensor(node).to(dtype)
    return cast


def _stacks(experts: ExpertList, dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """Return the experts' matrices in the stock layout of their form, on meta."""
    form, sizes = parse_form(experts.form), (experts.count, experts.hidden, experts.intermediate)
    return {
        name: nn.Parameter(torch.empty(stock_shape(form, name, *sizes), dtype=dtype, device="meta"))
        for name in stock_names(form)
    }


def same_computation(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    """Return whether two graphs in normal form compute the same on the same tensors, ignoring node names."""
    return _rows(one) == _rows(other)


def _rows(graph_module: fx.GraphModule) -> list[object]:
    order = {node: number for number, node in enumerate(nodes_of(graph_module))}
    return [
        (node.op, str(node.target), str(fx.map_arg((node.args, node.kwargs), lambda n: f"%{order[n]}")))
        if node.op != "placeholder" else node.op
        for node in order
    ]  # fmt: skip

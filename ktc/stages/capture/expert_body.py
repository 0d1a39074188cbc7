"""Read what one expert computes: from its rows of the hidden states to its result, by matrices of stacked parameters.

Input: the node of the result, and what the expert shares with others (its rows, the parameters' names). Output: `Body`,
and of one of them `Mlp`: the form, the sizes, and which tensor holds each part. Refused (`NoExperts`): a computation
that is not an MLP with one or two first layers, one that uses anything else than its rows and its own matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor, fx

from ktc.model.experts.own_module import TensorLayout
from ktc.model.graph import ops
from ktc.model.graph.typed import input_of, tensor_of
from ktc.model.kernels.form import ExpertsForm
from ktc.stages.capture.canonical import NoExperts
from ktc.stages.capture.forms import form_of_code

_TURNS = frozenset({"numpy_T", "mT", "permute"})
_COPIES = frozenset({"clone", "contiguous", "alias"})


def value(node: fx.Node) -> fx.Node:
    """Return the value that `node` casts or reshapes; the last dimension keeps its size."""
    while is_copy(node) or (ops.name_of(node) == "reshape" and _keeps_columns(node)):
        node = input_of(node, 0)
    return node


def is_copy(node: fx.Node) -> bool:
    """Return whether `node` has the numbers of its input, in any float dtype, and their gradients."""
    if ops.name_of(node) in _COPIES:
        return True
    tensor = tensor_of(node)
    return ops.name_of(node) == "cast" and tensor is not None and tensor.is_floating_point()


def _keeps_columns(node: fx.Node) -> bool:
    before, after = tensor_of(input_of(node, 0)), tensor_of(node)
    return before is not None and after is not None and before.shape[-1:] == after.shape[-1:]


@dataclass(frozen=True, slots=True)
class Shared:
    """The hidden states, the names of the parameters, and the rows of an expert: None where products are batched."""

    hidden: fx.Node
    names: Mapping[fx.Node, str]
    token: fx.Node | None

    def is_input(self, node: fx.Node) -> bool:
        """Return whether a value is the expert's rows of the hidden states; batched, whether it is all of them."""
        if self.token is None:
            return node is self.hidden
        if ops.name_of(node) not in ("index", "index_select") or value(input_of(node, 0)) is not self.hidden:
            return False
        rows = node.args[1] if ops.name_of(node) == "index" else node.args[2:3]
        by_rows = ops.name_of(node) == "index" or bool(node.args[1] == 0)
        return by_rows and list(cast("list[object]", rows)) == [self.token]


@dataclass(frozen=True, slots=True)
class Layer:
    """A product with an expert's matrix. `number` is the expert, None where all are multiplied at once.

    `layout` says where its weights are, in a tensor of `count` experts.
    """

    source: fx.Node
    layout: TensorLayout
    bias: TensorLayout | None
    number: int | None
    count: int
    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True)
class Body:
    """The layers of an expert by their nodes, and its computation as text, in which it has no number."""

    first: Mapping[fx.Node, Layer]
    last: Layer
    code: str

    @property
    def number(self) -> int | None:
        """The expert whose matrices these are."""
        return self.last.number


@dataclass(frozen=True, slots=True)
class Mlp:
    """The computation of an expert. `count` is the number of experts that all of its tensors have."""

    count: int
    sizes: tuple[int, int]  # hidden, intermediate
    form: ExpertsForm
    parts: Mapping[str, TensorLayout]


def read_body(result: fx.Node, shared: Shared) -> Body:
    """Return the computation of `result`. Raises NoExperts."""
    last = _layer(value(result), shared)
    if last is None:
        raise NoExperts(f"an expert's result is not that of a linear layer: `{ops.name_of(value(result))}`")
    first: dict[fx.Node, Layer] = {}
    todo, seen = [value(last.source)], set[fx.Node]()
    while todo:
        node = value(todo.pop())
        if node in seen:
            continue
        seen.add(node)
        layer = _layer(node, shared)
        if layer is not None:
            first[node] = layer
            if not shared.is_input(value(layer.source)):
                given = ops.name_of(value(layer.source))
                raise NoExperts(f"the first layer of an expert does not get its rows, but `{given}`")
            continue
        if node.op != "call_function" or shared.is_input(node):
            raise NoExperts(f"an expert uses `{node.name}` besides its rows and matrices")
        todo += [i for i in node.all_input_nodes if tensor_of(i) is not None or ops.name_of(node) == "getitem"]
    order = {node: place for place, node in enumerate(result.graph.nodes)}
    first = dict(sorted(first.items(), key=lambda pair: order[pair[0]]))
    layers = (*first.values(), last)
    if len({(layer.number, layer.bias is None) for layer in layers}) != 1:
        raise NoExperts("an expert uses matrices of another expert, or some of its biases are missing")
    matrices = [(layer.layout, layer.bias, layer.count, layer.inputs, layer.outputs) for layer in layers]
    return Body(first, last, f"{_spelled(last.source, list(first))} {matrices}")


def _spelled(node: fx.Node, first: list[fx.Node]) -> str:
    node = value(node)
    if node in first:
        return f"layer {first.index(node)}"
    args = fx.map_arg((node.args, node.kwargs), lambda n: cast("Any", _spelled(n, first)))
    return f"{ops.name_of(node)}{args}"


def mlp_of(body: Body) -> Mlp:
    """Return what the expert computes, by the values of its activation. Raises NoExperts."""
    first, last = list(body.first.items()), body.last
    if len(first) not in (1, 2):
        raise NoExperts(f"an expert has {len(first)} first layers")
    gated = len(first) == 2 or first[0][1].outputs == 2 * last.inputs
    width = last.inputs * (2 if gated else 1)
    if sum(layer.outputs for _, layer in first) != width or {layer.inputs for _, layer in first} != {last.outputs}:
        raise NoExperts("the sizes of an expert's matrices do not fit together")
    activation = read_activation(list(body.first), last.source, gated=gated, width=width, batched=last.number is None)
    if activation is None:
        raise NoExperts("its experts have an activation that no kernel computes")
    form, order = activation
    layers = {part: body.first[node] for part, node in order.items()} | {"down": last}
    parts = {part: layer.layout for part, layer in layers.items()}
    transposed = len(first) == 1 and all(layout.turned for layout in parts.values())
    parts |= {f"{part}_bias": layer.bias for part, layer in layers.items() if layer.bias is not None}
    counts = {layer.count for layer in layers.values() if layer.layout.flat}
    if len(counts) > 1:
        raise NoExperts("its matrices are of different numbers of experts")
    form = replace(form, biased=last.bias is not None, transposed=transposed)
    return Mlp(
        counts.pop() if counts else min(la.count for la in layers.values()), (last.outputs, last.inputs), form, parts
    )


def read_activation(
    first: Sequence[fx.Node], source: fx.Node, *, gated: bool, width: int, batched: bool = False
) -> tuple[ExpertsForm, dict[str, fx.Node]] | None:
    """Return the form of the code between the first layers of an MLP and `source`, the input of its last one.

    The layers come by the part that they are: `gate` and `up`, `gate_up` in one, or `up`. None if no kernel computes
    the code on `width` columns. `batched` code counts dimensions from an outer one.
    """
    names = ("gate_up",) if gated and len(first) == 1 else ("gate", "up") if gated else ("up",)
    for order in dict.fromkeys((tuple(first), tuple(reversed(first)))):
        if form := form_of_code(_between(order, source, batched), gated, width):
            return form, dict(zip(names, order, strict=True))
    return None


def _between(first: Sequence[fx.Node], source: fx.Node, batched: bool) -> Callable[[Tensor], Tensor]:
    """Return the function from gate and up, concatenated, to `source`."""

    def code(sample: Tensor) -> Tensor:
        pieces = sample.chunk(len(first), -1)
        values: dict[fx.Node, object] = {
            node: piece[None] if batched else piece for node, piece in zip(first, pieces, strict=True)
        }
        result = cast("Tensor", _evaluated(source, values, sample))
        return result[0] if batched else result

    return code


def _evaluated(node: fx.Node, values: dict[fx.Node, object], sample: Tensor) -> object:
    """Return a node's value from the known values. Casts are skipped; sizes of inputs are those of the sample."""
    node = value(node)
    if node not in values:
        if node.op == "placeholder":
            return sample
        assert callable(node.target), f"`{node.name}` is not a call"
        args = fx.map_arg(node.args, lambda n: cast("Any", _evaluated(n, values, sample)))
        kwargs = fx.map_arg(node.kwargs, lambda n: cast("Any", _evaluated(n, values, sample)))
        values[node] = node.target(*cast("tuple[object, ...]", args), **cast("dict[str, object]", kwargs))
    return values[node]


# Matrices ------------------------------------------------------------------------------------------------------------
def _layer(node: fx.Node, shared: Shared) -> Layer | None:
    """Return the linear layer that `node` computes, in any notation."""
    bias: object = None
    match ops.name_of(node):
        case "linear":
            source, matrix, turned, bias = node.args[0], node.args[1], False, ops.argument(node, "bias")
        case "matmul":
            source, matrix, turned = node.args[0], node.args[1], True
        case "addmm":
            bias, source, matrix, turned = *node.args[:3], True
            if (ops.argument(node, "beta", 1), ops.argument(node, "alpha", 1)) != (1, 1):
                return None
        case _:
            return None
    weight = _matrix(matrix, shared)
    if not isinstance(source, fx.Node) or weight is None or len(weight.shape) != 2:
        return None
    of_bias = _matrix(bias, shared)
    swapped = weight.layout.turned != turned
    outputs, inputs = weight.shape[::-1] if swapped else weight.shape
    if bias is not None and (of_bias is None or of_bias.number != weight.number or of_bias.shape != (outputs,)):
        raise NoExperts("an expert's bias is not one of its own")
    rows = tensor_of(source)
    if rows is None or rows.dim() != (3 if weight.number is None else 2):
        return None
    if weight.number is None and rows.shape[0] != weight.count:
        return None
    layout = replace(weight.layout, turned=swapped)
    return Layer(source, layout, of_bias.layout if of_bias else None, weight.number, weight.count, inputs, outputs)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One expert's slice of a parameter; `shape` is that of the slice as it is stored."""

    layout: TensorLayout
    number: int | None
    count: int
    shape: tuple[int, ...]


def _matrix(node: object, shared: Shared) -> _Matrix | None:
    """Return the slice of a parameter that `node` is; batched, all of it. None for another value."""
    turned, number, batched = False, None, shared.token is None
    while isinstance(node, fx.Node) and node not in shared.names:
        name = ops.name_of(node)
        if name in _TURNS and _swaps_the_last_two(node):
            turned = not turned
        elif name == "select" and number is None and not batched and node.args[1] == 0:
            number = node.args[2]
        elif name == "reshape" and (number is not None or batched):
            return _flat(node, shared, number, turned)
        elif not is_copy(node):
            return None
        node = input_of(node, 0)
    tensor = tensor_of(node) if isinstance(node, fx.Node) else None
    if not isinstance(node, fx.Node) or tensor is None or tensor.dim() < 2 or (number is None) != batched:
        return None
    count, *shape = map(int, tensor.shape)
    return _Matrix(TensorLayout(shared.names[node], turned=turned), _number(number), count, tuple(shape))


def _number(number: object) -> int | None:
    return number if isinstance(number, int) else None


def _flat(node: fx.Node, shared: Shared, number: object, turned: bool) -> _Matrix | None:
    """Return a slice of a parameter that holds the experts' rows one after another."""
    source, viewed = input_of(node, 0), tensor_of(node)
    stored = tensor_of(source)
    if source not in shared.names or viewed is None or stored is None or viewed.dim() != stored.dim() + 1:
        return None
    count, *shape = map(int, viewed.shape)
    if int(stored.shape[0]) != count * shape[0] or list(map(int, stored.shape[1:])) != shape[1:]:
        return None
    return _Matrix(TensorLayout(shared.names[source], flat=True, turned=turned), _number(number), count, tuple(shape))


def _swaps_the_last_two(node: fx.Node) -> bool:
    tensor = tensor_of(input_of(node, 0))
    if tensor is None or tensor.dim() < 2:
        return False
    rank = tensor.dim()
    aten = str(getattr(node.target, "overloadpacket", "")).rpartition(".")[2]
    if aten in ("t", "numpy_T", "mT"):
        return rank == 2 or aten == "mT"
    dims = cast("tuple[Any, ...]", node.args[1:])
    if aten == "transpose":
        return {dim % rank for dim in dims} == {rank - 1, rank - 2}
    return aten == "permute" and [dim % rank for dim in dims[0]] == [*range(rank - 2), rank - 1, rank - 2]

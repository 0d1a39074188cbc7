"""Read the exported code of an experts module: a loop over stacked tensors, or batched products over all experts.

Input: the graph of a module that ran once for every expert, its inputs by role, and the names of its parameters.
Output: `Loop`, the computation of its experts and the tensors that hold them. Refused (`NoExperts`): a value that is
not read to the end, experts that differ, a mask that picks other tokens than those of its expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx

from ktc.model.experts.own_module import Called, Role, TensorLayout
from ktc.model.graph import ops
from ktc.model.graph.typed import input_of, nodes_in, tensor_of
from ktc.model.kernels.form import ExpertsForm
from ktc.stages.capture.canonical import NoExperts
from ktc.stages.capture.expert_body import Body, Shared, is_copy, mlp_of, read_body
from ktc.stages.capture.expert_body import value as plain_value

_TOKENS, _CHOSEN = 61, 5  # of the sample on which masks are compared, at least
# The operators of a mask: each works element by element, or moves elements.
_OF_MASKS = frozenset({
    "one_hot", "permute", "select", "squeeze", "unsqueeze", "eq", "cast", "clone", "contiguous", "arange", "expand",
    "detach", "alias",
})  # fmt: skip
_SUMS = frozenset({"index_add", "index_add_"})
_ZEROS = frozenset({"zeros_like", "zeros", "new_zeros"})


@dataclass(frozen=True, slots=True)
class Loop:
    """The computation of all experts. `sizes` are the experts with matrices, H and I."""

    sizes: tuple[int, int, int]
    form: ExpertsForm
    parts: Mapping[str, TensorLayout]
    called: Called


@dataclass(frozen=True, slots=True)
class _Contribution:
    """One step of the loop: it adds `y` times the weights to the rows `token`, where `mask` is true."""

    y: fx.Node
    token: fx.Node
    mask: fx.Node
    dims: tuple[int, int]  # of the mask: the token, the slot


def read_loop(graph: fx.Graph, inputs: Mapping[Role, fx.Node], names: Mapping[fx.Node, str]) -> Loop:
    """Read a loop over hidden states, indices and weights. Raises NoExperts."""
    _require_no_writes(graph)
    result = _result(graph)
    contributions = [_contribution(inputs, token, source) for token, source in _added(result)]
    masks = _Masks(inputs["index"])
    bodies: dict[int, Body | None] = {}
    total = len(contributions)
    for contribution in contributions:
        rows = Shared(inputs["hidden"], names, contribution.token)
        number = masks.expert(contribution.mask, contribution.dims, total)
        if number in bodies:
            raise NoExperts(f"expert {number} adds to the result twice")
        bodies[number] = None if rows.is_input(plain_value(contribution.y)) else read_body(contribution.y, rows)
    count = sum(body is not None for body in bodies.values())
    first = bodies.get(0)
    if first is None or any(bodies.get(number) is None for number in range(count)):
        raise NoExperts("experts without matrices are not behind the others")
    if any(body is not None and (body.number, body.code) != (n, first.code) for n, body in bodies.items()):
        raise NoExperts("its experts do not all compute the same")
    mlp = mlp_of(first)
    if any(layout.flat for layout in mlp.parts.values()) and mlp.count != count:
        raise NoExperts(f"its matrices are of {mlp.count} experts, of which {count} are used")
    return Loop((count, *mlp.sizes), mlp.form, mlp.parts, "identity" if count < total else "routed")


def read_batched(graph: fx.Graph, inputs: Mapping[Role, fx.Node], names: Mapping[fx.Node, str]) -> Loop:
    """Read batched products over rows that are sorted by expert, as many for each. Raises NoExperts."""
    _require_no_writes(graph)
    mlp = mlp_of(read_body(_result(graph), Shared(inputs["hidden"], names, None)))
    return Loop((mlp.count, *mlp.sizes), mlp.form, mlp.parts, "by_expert")


def _result(graph: fx.Graph) -> fx.Node:
    (output,) = (node for node in graph.nodes if node.op == "output")
    results = nodes_in(output.args[0])
    if len(results) != 1:
        raise NoExperts("it returns more than hidden states")
    return plain_value(results[0])


def _require_no_writes(graph: fx.Graph) -> None:
    for node in graph.nodes:
        name = ops.name_of(node)
        if node.op == "call_function" and name.endswith("_") and not name.endswith("__") and name not in _SUMS:
            raise NoExperts(f"it changes a tensor in place: `{name}`")


def _added(result: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the rows and the values that are added up to `result`, from zero."""
    node = result
    while ops.name_of(node) in _SUMS:
        base, dim, token, source = node.args[:4]
        scale = ops.argument(node, "alpha", 1)
        if dim != 0 or scale != 1 or not all(isinstance(a, fx.Node) for a in (base, token, source)):
            raise NoExperts("it does not add up rows")
        assert isinstance(base, fx.Node) and isinstance(token, fx.Node) and isinstance(source, fx.Node)
        if len(base.users) != 1:
            raise NoExperts("it uses the sum before it is complete")
        yield token, source
        node = base
    if ops.name_of(node) not in _ZEROS:
        raise NoExperts(f"its result is not a sum over experts from zero: `{ops.name_of(node)}`")


def _contribution(inputs: Mapping[Role, fx.Node], token: fx.Node, source: fx.Node) -> _Contribution:
    product = plain_value(source)
    if ops.name_of(product) == "mul":
        for y, weight in (product.args[:2], product.args[1::-1]):
            picked = _weight_of(weight, inputs["weights"])
            if isinstance(y, fx.Node) and picked is not None and _pick(picked[0]) == _pick(token):
                (mask, token_dim), (other, slot_dim) = _pick(picked[0]), _pick(picked[1])
                if mask is other and {token_dim, slot_dim} == {0, 1}:
                    return _Contribution(y, token, mask, (token_dim, slot_dim))
    raise NoExperts("the result of an expert is not scaled by the weights of its tokens")


def _weight_of(node: object, weights: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the tokens and the slots whose weights `node` has, as a column; None for another value."""
    if not isinstance(node, fx.Node):
        return None
    gathered = _without_ones(node)
    if ops.name_of(gathered) != "index" or _without_ones(input_of(gathered, 0)) is not weights:
        return None
    picks = nodes_in(gathered.args[1])
    column = tensor_of(node)
    is_column = column is not None and column.dim() == 2 and column.shape[1] == 1
    return (picks[0], picks[1]) if len(picks) == 2 and is_column else None


def _without_ones(node: fx.Node) -> fx.Node:
    """Return the value behind casts and dimensions of size one."""
    while is_copy(node) or ops.name_of(node) in ("unsqueeze", "squeeze") or _adds_a_one(node):
        node = input_of(node, 0)
    return node


def _adds_a_one(node: fx.Node) -> bool:
    if ops.name_of(node) != "reshape":
        return False
    before, after = tensor_of(input_of(node, 0)), tensor_of(node)
    return before is not None and after is not None and before.dim() == 1 and after.dim() == 2 and after.shape[1] == 1


def _pick(node: fx.Node) -> tuple[fx.Node, int]:
    """Return the mask whose rows `node` lists, and the dimension. Raises NoExperts."""
    if ops.name_of(node) == "select" and ops.name_of(input_of(node, 0)) == "stack":
        node = nodes_in(input_of(node, 0).args[0])[int(ops.argument(node, "index"))]
    if ops.name_of(node) != "picked":
        raise NoExperts("an expert's tokens are not those of a mask")
    return input_of(node, 0), int(ops.argument(node, "dim"))


class _Masks:
    """The masks of all experts, compared by value: an expert's mask is true where the index is its number."""

    def __init__(self, index: fx.Node) -> None:
        self._index = index
        self._values: dict[fx.Node, Tensor] = {}
        self._total = 0

    def expert(self, mask: fx.Node, dims: tuple[int, int], total: int) -> int:
        """Return the number of the expert whose mask this is, below `total`. Raises NoExperts."""
        if self._total != total:
            sample = torch.arange(max(_TOKENS, total))[:, None] + torch.arange(_CHOSEN)[None] * 3
            self._values, self._total = {self._index: sample % total}, total
        picked = self._evaluated(mask)
        if picked.dim() == 2:
            picked = picked.bool().permute(dims)
            sample = self._values[self._index]
            chosen = cast("Tensor", sample[picked].unique()) if picked.shape == sample.shape else sample[:0]
            numbers = cast("list[int]", chosen.tolist())
            if len(numbers) == 1 and torch.equal(picked, sample == numbers[0]):
                return numbers[0]
        raise NoExperts("a mask picks other tokens than those of its expert")

    def _evaluated(self, node: fx.Node) -> Tensor:
        todo = [node]
        while todo:
            current = todo[-1]
            if current in self._values:
                todo.pop()
                continue
            if current.op != "call_function" or ops.name_of(current) not in _OF_MASKS:
                raise NoExperts(f"a mask is computed by `{ops.name_of(current)}` of more than the indices")
            missing = [i for i in current.all_input_nodes if i not in self._values]
            todo += missing
            if not missing:
                self._values[todo.pop()] = self._called(current)
        return self._values[node]

    def _called(self, node: fx.Node) -> Tensor:
        args = fx.map_arg(node.args, lambda n: self._values[n])
        kwargs = fx.map_arg({k: v for k, v in node.kwargs.items() if k != "device"}, lambda n: self._values[n])
        return node.target(*args, **kwargs)  # type: ignore[operator,no-any-return]

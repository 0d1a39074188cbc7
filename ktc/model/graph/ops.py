"""The normal-form operators: the name, operands and attributes of captured nodes.

A block's graph stays runnable ATen. This table gives each node the one name that patterns, plans and dumps use
(`node.meta["op"]`). Operands are the values that a pattern names, without parameters and layout arguments. The two
semantic operators of capture, `experts` and `sdpa`, are plain differentiable functions here, so a captured graph runs
and back-propagates without any kernel.
"""

from __future__ import annotations

import math
import operator as python_operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from ktc.model.experts.private_api import schema_of
from ktc.model.experts.references.reference import fused_moe_reference
from ktc.model.graph.typed import input_of, nodes_in, tensor_of
from ktc.model.kernels.form import parse_form

# Transparent to the matcher: they move, rename or cast a value without computing on it.
TRANSPARENT = frozenset({
    "reshape", "unsqueeze", "squeeze", "expand", "permute", "cast", "clone", "alias", "detach", "contiguous", "flatten",
    "unflatten", "repeat", "dropout",
})  # fmt: skip
COMMUTATIVE = frozenset({"add", "mul"})
# Operators at which `from(t)` in a pattern stops.
SEMANTIC = frozenset({"linear", "sdpa", "experts", "recurrence"})
# Required arguments that no pattern names: with another value the node is another operator.
PLAIN: dict[str, dict[str, Any]] = {
    "topk": {"largest": True}, "add": {"alpha": 1}, "sub": {"alpha": 1}, "div": {"rounding_mode": None},
}  # fmt: skip
# Operators whose `dim` must be the last one unless a pattern names it.
LAST_DIM = frozenset({"softmax", "topk", "sum", "max", "mean", "gather", "cat", "split", "scatter"})

_NAMES: dict[str, str] = {
    "view": "reshape", "_unsafe_view": "reshape", "reshape": "reshape", "unsqueeze": "unsqueeze", "squeeze": "squeeze",
    "expand": "expand", "permute": "permute", "transpose": "permute", "t": "permute", "movedim": "permute",
    "_to_copy": "cast", "to": "cast", "type_as": "cast", "clone": "clone", "alias": "alias", "detach": "detach",
    "contiguous": "contiguous", "lift_fresh_copy": "clone", "flatten": "flatten", "unflatten": "unflatten",
    "repeat": "repeat", "dropout": "dropout",
    "linear": "linear", "embedding": "embedding", "layer_norm": "layer_norm", "rms_norm": "rms_norm",
    "_fused_rms_norm": "rms_norm", "matmul": "matmul", "mm": "matmul", "bmm": "matmul",
    "silu": "silu", "gelu": "gelu", "relu": "relu", "tanh": "tanh", "sigmoid": "sigmoid", "softmax": "softmax",
    "_softmax": "softmax", "softplus": "softplus", "exp": "exp", "add": "add", "mul": "mul", "sub": "sub", "div": "div",
    "neg": "neg", "sum": "sum", "max": "max", "amax": "max", "mean": "mean", "topk": "topk", "gather": "gather",
    "scatter": "scatter", "masked_fill": "masked_fill", "where": "select", "full_like": "full_like",
    "zeros_like": "zeros_like", "logical_not": "logical_not", "bitwise_not": "logical_not", "one_hot": "one_hot",
    "split": "split", "split_with_sizes": "split", "chunk": "split", "cat": "cat", "slice": "slice",
}  # fmt: skip
_OPERANDS = {
    "linear": 1, "rms_norm": 1, "layer_norm": 1, "softmax": 1, "topk": 1, "sum": 1, "max": 1, "mean": 1, "split": 1,
    "conv1d": 1, "masked_fill": 2, "experts": 3, "sdpa": 3, "rope": 1, "zeros_like": 1, "full_like": 1, "slice": 1,
}  # fmt: skip
# Optional arguments of `sdpa`; the attributes of these names are whether they are given.
_SDPA_OPTIONS = ("sinks", "mask", "softcap", "bias")
SDPA_SINKS, SDPA_MASK = 6, 7  # the positions of `sinks` and `mask` among its arguments


def experts(
    hidden: Tensor, indices: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, form: str = "silu",
    *biases: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute all routed experts of one layer: hidden (T, H), indices (T, k) int64, weights (T, k) -> (T, H).

    The expert tensors, and the biases of gate_up and of down where the form has them, have the stock shapes of `form`
    (see `ExpertsForm`). The semantic node of capture; differentiable in every floating-point argument.
    """
    stock = (gate_up, down, *(bias for bias in biases if bias is not None))
    return fused_moe_reference(hidden, indices, weights, stock, form)


def sdpa(  # noqa: PLR0913 - the arguments of torch's operator
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, window: int,
    sinks: Tensor | None = None, mask: Tensor | None = None,
    softcap: float | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute attention: query (b, h, s, d), key and value (b, h_kv, s, d) -> (b, s, h, d_v).

    Positions attend to themselves and, if `causal`, to earlier positions, at most `window` back; `window` < 0 is
    unlimited. A `mask` (b, 1 or h, s, s), bool or added to the scores, replaces `causal` and `window`. A `softcap`
    bounds the scaled scores by tanh; then `bias` (b, h, s, s) is added; then the mask applies. `sinks`, (h,) or
    (b, h, s, 1), are additional scores in every softmax, without a value.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    allowed = mask
    if mask is None and (causal or window >= 0):
        row, column = (torch.arange(size, device=query.device) for size in (query.shape[2], key.shape[2]))
        distance = row[:, None] - column[None, :]
        allowed = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        if window >= 0:
            allowed = allowed & (distance < window)
    if sinks is None and softcap is None and bias is None:
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=scale)
    else:
        scores = query @ key.transpose(2, 3) * scale
        attended = _weights_of(scores, allowed, sinks, softcap, bias) @ value
    return attended.transpose(1, 2)


def _weights_of(
    scores: Tensor, allowed: Tensor | None, sinks: Tensor | None, softcap: float | None, bias: Tensor | None
) -> Tensor:
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf) if allowed.dtype == torch.bool else scores + allowed
    if sinks is None:
        return torch.softmax(scores, -1)
    sinks = sinks.reshape(1, -1, 1, 1) if sinks.dim() == 1 else sinks
    sink = sinks.to(scores.dtype).expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]


def data_mask(mask: Tensor, inputs: list[Tensor]) -> Tensor:
    """Choose keys by a module's own code, which reads data: the graph has its place and not its computation."""
    raise NotImplementedError("the mask of this block is computed by its own code alone")


def recurrence(*values: Tensor) -> Tensor:
    """Join positions other than by attention: the opaque core of a recurrent layer, which its block computes."""
    raise NotImplementedError("the core of a recurrent layer is computed by its own code alone")


def computed(*values: Tensor) -> Tensor:
    """Compute with values by code that a graph of a recurrent layer does not show."""
    raise NotImplementedError("a graph of a recurrent layer shows no code between its parts")


def norm(value: Tensor) -> Tensor:
    """Normalise a value by a module with code of its own: of a recurrent layer, often with a gate."""
    raise NotImplementedError("a norm of a recurrent layer is computed by its own code alone")


def transfer(value: Tensor, device: str) -> Tensor:
    """Move `value` to `device`; the node that `place` inserts on an edge between two devices."""
    return value.to(device)


def _aten_name(target: object) -> str | None:
    packet = getattr(target, "overloadpacket", None)
    return None if packet is None else str(packet).rpartition(".")[2]


def name_of(node: fx.Node) -> str:
    """Return the normal-form operator of a node without one in its `meta`; for a Python function, its own name."""
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        return "weight"
    if node.op == "output":
        return "output"
    if node.target is python_operator.getitem:
        return "getitem"
    aten = _aten_name(node.target)
    if aten is None:
        return str(getattr(node.target, "__name__", node.target))
    name = _NAMES.get(aten, aten)
    if name == "full_like" and argument(node, "fill_value") == 0:
        return "zeros_like"
    if name == "clamp" and (argument(node, "min") is None or argument(node, "max") is None):
        return "clamp_max" if argument(node, "min") is None else "clamp_min"
    return name


def operator(node: fx.Node) -> str:
    """Return the normal-form operator of `node`."""
    recorded = node.meta.get("op")
    return recorded if isinstance(recorded, str) else name_of(node)


def argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """Return the argument of an ATen call by its schema name, or `default` if it is missing."""
    if name in node.kwargs:
        return node.kwargs[name]
    schema = schema_of(node.target)
    if schema is None:
        return default
    for position, declared in enumerate(schema.arguments):
        if declared.name == name:
            if position < len(node.args):
                return node.args[position]
            return declared.default_value if declared.has_default_value() else default
    return default


Operand = fx.Node | int | float


def operands(node: fx.Node) -> tuple[Operand, ...]:
    """Return the operands of `node` as patterns see them: nodes, and scalars of arithmetic operators."""
    name = operator(node)
    if name == "cat":
        return tuple(nodes_in(node.args[0]))
    if name == "embedding":
        return (input_of(node, 1),)
    arithmetic = name in ("add", "sub", "mul", "div", "pow", "clamp_min", "clamp_max")
    values: list[Operand] = [
        a for a in node.args
        if isinstance(a, fx.Node) or (arithmetic and isinstance(a, int | float) and not isinstance(a, bool))
    ]  # fmt: skip
    return tuple(values[: _OPERANDS.get(name)])


def attributes(node: fx.Node) -> dict[str, int | float | bool | str]:
    """Return the attributes of `node` for patterns and conditions. Widths are those of the meta tensors.

    A rewritten node keeps the attributes of its original node in its `meta`.
    """
    if "attributes" in node.meta:
        return dict(node.meta["attributes"])
    read: Callable[[fx.Node], dict[str, Any]] | None = _ATTRIBUTES.get(operator(node))
    return {} if read is None else read(node)


def shape_of(value: object) -> tuple[Any, ...]:
    """Return the (possibly symbolic) shape of a node's meta tensor, () if it has none."""
    tensor = tensor_of(value) if isinstance(value, fx.Node) else None
    return () if tensor is None else tuple(tensor.shape)


def works_along(node: fx.Node, wanted: object) -> bool:
    """Return whether the operator works along dimension `wanted` alone; -1 also fits a node without a dimension."""
    dim = argument(node, "dim")
    dims: list[Any] = [*dim] if isinstance(dim, list | tuple) else [dim]
    first = nodes_in(node.args[0])[0] if operator(node) == "cat" else node.args[0]
    rank = len(shape_of(first))
    if dims == [None] or not isinstance(wanted, int):
        return wanted == -1
    return rank > 0 and [d % rank for d in dims] == [wanted % rank]


def _linear_attributes(node: fx.Node) -> dict[str, Any]:
    rows, columns = shape_of(node.args[1])[-2:]
    return {"in_features": int(columns), "out_features": int(rows), "bias": argument(node, "bias") is not None}


def _experts_attributes(node: fx.Node) -> dict[str, Any]:
    form = parse_form(str(node.args[5]))
    count, *sizes = shape_of(node.args[4])
    hidden, intermediate = reversed(sizes) if form.transposed else sizes
    # Values that rules compare `act` with; the form has every number.
    act = "swiglu_oai" if form.activation.up_offset else form.activation.function
    return {
        "num_experts": int(count), "hidden": int(hidden), "inter": int(intermediate), "act": act, "form": str(form),
    }  # fmt: skip


_ATTRIBUTES: dict[str, Callable[[fx.Node], dict[str, Any]]] = {
    "linear": _linear_attributes,
    "experts": _experts_attributes,
    "topk": lambda n: {"k": argument(n, "k")},
    "sdpa": lambda n: {
        **dict(zip(("scale", "causal", "window"), n.args[3:6], strict=True)),
        **{name: value is not None for name, value in zip(_SDPA_OPTIONS, n.args[6:], strict=True)},
    },
    "rms_norm": lambda n: {"eps": n.meta.get("eps", argument(n, "eps", 0.0))},
    "masked_fill": lambda n: {"value": argument(n, "value", -math.inf)},
    "embedding": lambda n: dict(zip(("rows", "dim"), shape_of(n.args[0]), strict=False)),
}

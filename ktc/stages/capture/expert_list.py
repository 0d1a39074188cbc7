"""Experts that a block keeps as a list of modules: find such lists and determine what one expert computes.

Input: a block on meta tensors. Output: for each list of equal gated (or ungated) MLPs its form and the names of its
matrices. One child is exported alone. Its first linear layers, its last one and the code between them are read from
the graph; the activation is identified by its values. Lists of other modules are not experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from ktc.model.graph import ops
from ktc.model.graph.typed import input_of, named_modules, nodes_in, nodes_of
from ktc.stages.capture.export import BATCH, SEQUENCE, export_block
from ktc.stages.capture.forms import form_of_code
from ktc.stages.capture.types import ExpertList


def candidates(block: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """Return every list of two or more equal modules in `block`, with its FQN there."""
    return [
        (fqn, module)
        for fqn, module in named_modules(block)
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len(set(map(_structure, _children(module)))) == 1
    ]


def _children(modules: nn.ModuleList) -> list[nn.Module]:
    return list(modules)


def _structure(module: nn.Module) -> object:
    """Return classes, plain settings and tensor shapes: modules with equal structure differ in values only."""
    settings = tuple(
        (name, type(m).__name__, *((k, v) for k, v in sorted(vars(m).items()) if isinstance(v, int | float | str)))
        for name, m in named_modules(module)
    )
    return settings, tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())


def expert_list(fqn: str, modules: nn.ModuleList, hidden: int) -> ExpertList | None:
    """Return what the modules of a list compute on hidden states of width `hidden`; None if they are not MLPs."""
    child, sample = _children(modules)[0], torch.empty(BATCH * SEQUENCE, hidden, device="meta")
    first = next(child.parameters(), None)
    if first is None:
        return None
    try:
        graph = export_block(child, (sample.to(first.dtype),), {}, whole=True)
    except Exception:  # noqa: BLE001 - a list may be of any modules (norms, convolutions), on which export raises
        return None  # not MLPs on hidden states: `model` reports the list if its block cannot be captured
    mlp = _mlp(graph)
    return None if mlp is None else _read(fqn, len(modules), mlp)


@dataclass(frozen=True, slots=True)
class _Mlp:
    """The nodes of one MLP: the linear layers after its input, the one before its output, and all nodes."""

    nodes: tuple[fx.Node, ...]
    first: tuple[fx.Node, ...]
    last: fx.Node


def _mlp(graph: fx.GraphModule) -> _Mlp | None:
    nodes = tuple(nodes_of(graph))
    linear = [node for node in nodes if ops.name_of(node) == "linear"]
    first = tuple(node for node in linear if _behind(input_of(node, 0)).op == "placeholder")
    results = nodes_in(nodes[-1].args[0]) or [input_of(nodes[-1], 0)]
    last = _behind(results[0])
    if last not in linear or last in first or len(first) not in (1, 2) or len(linear) != len(first) + 1:
        return None
    weights = {node for layer in linear for node in layer.all_input_nodes[1:]}
    others = {node for node in nodes if node.op == "get_attr"} - weights
    return None if others else _Mlp(nodes, first, last)


def _behind(node: fx.Node) -> fx.Node:
    while ops.name_of(node) in ops.TRANSPARENT:
        node = input_of(node, 0)
    return node


def _read(fqn: str, count: int, mlp: _Mlp) -> ExpertList | None:
    wide, narrow = (ops.shape_of(node.args[1]) for node in (mlp.first[0], mlp.last))
    fused = len(mlp.first) == 1 and wide[0] == 2 * narrow[1]
    gated = fused or len(mlp.first) == 2
    for order in [mlp.first] if len(mlp.first) == 1 else [mlp.first, mlp.first[::-1]]:
        form = form_of_code(_between(mlp, order), gated, width=int(narrow[1]) * (2 if gated else 1))
        if form is not None:
            break
    else:
        return None
    names = ("gate_up",) if fused else ("gate", "up") if len(mlp.first) == 2 else ("up",)
    layers = dict(zip((*names, "down"), (*order, mlp.last), strict=True))
    biased = {ops.argument(node, "bias") is not None for node in layers.values()}
    if len(biased) > 1:
        return None
    parts = {part: str(input_of(node, 1).target) for part, node in layers.items()}
    if biased == {True}:
        parts |= {f"{part}_bias": str(input_of(node, 2).target) for part, node in layers.items()}
    return ExpertList(fqn, count, int(narrow[0]), int(narrow[1]), str(replace(form, biased=biased == {True})), parts)


def _between(mlp: _Mlp, order: tuple[fx.Node, ...]) -> Callable[[Tensor], Tensor]:
    """Return the function from gate and up, concatenated, to the input of the last linear layer."""

    def code(sample: Tensor) -> Tensor:
        pieces = [sample] if len(order) == 1 else list(sample.chunk(2, -1))
        values: dict[fx.Node, object] = dict(zip(order, pieces, strict=True))
        return cast("Tensor", _value(input_of(mlp.last, 0), values, sample))

    return code


def _value(node: fx.Node, values: dict[fx.Node, object], sample: Tensor) -> object:
    """Return a node's value from the known values; sizes come from the sample, casts are skipped."""
    if node not in values:
        if node.op == "placeholder":
            values[node] = sample
        elif ops.name_of(node) == "cast":
            values[node] = _value(input_of(node, 0), values, sample)
        else:
            assert node.op == "call_function" and callable(node.target), f"`{node.name}` is not a call"
            args = fx.map_arg(node.args, lambda n: cast("Any", _value(n, values, sample)))
            kwargs = fx.map_arg(node.kwargs, lambda n: cast("Any", _value(n, values, sample)))
            values[node] = node.target(*cast("tuple[object, ...]", args), **cast("Mapping[str, object]", kwargs))
    return values[node]

"""Experts that a block keeps as a list of modules: find such lists and determine what one expert computes.

Input: a block on meta tensors. Output: for each list of equal gated (or ungated) MLPs its form and the names of its
matrices. One child is exported alone. Its first linear layers, its last one and the code between them are read from
the graph; the activation is identified by its values. Lists of other modules are not experts.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx, nn

from ktc.model.graph import ops
from ktc.model.graph.latent import behind
from ktc.model.graph.typed import input_of, named_modules, nodes_in, nodes_of
from ktc.stages.capture.expert_body import read_activation
from ktc.stages.capture.export import BATCH, SEQUENCE, export_block
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
    return _read(fqn, len(modules), graph)


def _read(fqn: str, count: int, graph: fx.GraphModule) -> ExpertList | None:
    nodes = nodes_of(graph)
    linear = [node for node in nodes if ops.name_of(node) == "linear"]
    first = [node for node in linear if behind(input_of(node, 0)).op == "placeholder"]
    results = nodes_in(nodes[-1].args[0]) or [input_of(nodes[-1], 0)]
    last = behind(results[0])
    if last not in linear or last in first or len(first) not in (1, 2) or len(linear) != len(first) + 1:
        return None
    weights = {node for layer in linear for node in layer.all_input_nodes[1:]}
    if {node for node in nodes if node.op == "get_attr"} - weights:
        return None  # it computes with more than its layers
    hidden, intermediate = map(int, ops.shape_of(last.args[1]))
    gated = len(first) == 2 or ops.shape_of(first[0].args[1])[0] == 2 * intermediate
    activation = read_activation(first, input_of(last, 0), gated=gated, width=intermediate * (2 if gated else 1))
    if activation is None:
        return None
    form, layers = activation[0], {**activation[1], "down": last}
    biased = {ops.argument(node, "bias") is not None for node in layers.values()}
    if len(biased) > 1:
        return None
    parts = {part: str(input_of(node, 1).target) for part, node in layers.items()}
    if biased == {True}:
        parts |= {f"{part}_bias": str(input_of(node, 2).target) for part, node in layers.items()}
    return ExpertList(fqn, count, hidden, intermediate, str(replace(form, biased=biased == {True})), parts)

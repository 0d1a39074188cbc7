"""The memory per token of one running block of a model: from its graph and its adapters -> `Footprint`.

A model of autograd, not a measurement: for each operator, the tensors that its backward formula reads are saved once
if the value they come from needs a gradient. Frozen projections save nothing, since the gradient of their input needs
only the weight. docs/design.md, "Memory", has the rules and their measured error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import fx

from ktc.model.graph import ops
from ktc.model.graph.typed import nodes_in, nodes_of, tensor_of
from ktc.model.targets.target import LoraBytes
from ktc.stages.capture.export import BATCH, SEQUENCE

_TOKENS = BATCH * SEQUENCE
_OWN_VALUE = frozenset({"silu", "gelu", "relu", "tanh", "sigmoid", "softmax", "exp", "softplus"})  # one tensor each
_PRODUCTS = frozenset({"mul", "matmul", "div"})
_NOTHING = frozenset({
    "add", "sub", "neg", "cat", "sum", "mean", "split", "getitem", "slice", "cast", "rope", "embedding", "output",
    "experts", "transfer", *ops.TRANSPARENT,
})  # fmt: skip
_VIEWS = ops.TRANSPARENT - {"cast", "clone", "repeat", "contiguous", "dropout"}  # these hold no memory of their own


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes per token: `saved` for backward, `live` at the widest point of a forward.

    `saved_pair` and `live_pair` are those per token and position, where attention keeps its scores or masks in memory.
    `copied` are keys and values of a prompt with sinks, which are copied for some heads at once.
    """

    saved: float
    live: float
    saved_pair: float = 0.0
    live_pair: float = 0.0
    copied: float = 0.0

    def at(self, length: int) -> tuple[float, float]:
        """Return the saved and the live bytes of a token in sequences of this length."""
        return self.saved + length * self.saved_pair, self.live + length * self.live_pair


def keeps_scores(node: fx.Node, *, eager: bool) -> bool:
    """Return whether the scores of a core of attention are in memory as a whole: no fused operator computes them.

    `eager` says that the model's own code computes attention.
    """
    about = ops.attributes(node)
    return eager or bool(about["sinks"] or about["softcap"] or about["bias"])


def footprint(
    graph: fx.GraphModule, adapters: Mapping[str, LoraBytes], hidden: int, *, eager: bool = False,
    in_blocks: Collection[str] = (),
) -> Footprint:  # fmt: skip
    """Return the footprint of a block. `adapters` has the LoRA of linear nodes by name, `hidden` is the model's width.

    `eager` says that the model's own code computes attention, except for prompts of the cores `in_blocks`, which have
    sinks. The routed experts are not in it, since the plan chooses where they run.
    """
    trains = _with_gradient(graph, adapters, hidden)
    values, extra = set[fx.Node](), 0.0
    for node in nodes_of(graph):
        if node in trains:
            values.update(_storage(value) for value in _saved_values(node, trains))
            extra += _saved_copies(node, adapters.get(node.name))
    saved = sum(per_token(value) for value in values) + extra
    live = max((_live(node) for node in nodes_of(graph)), default=0.0)
    cores = [node for node in nodes_of(graph) if ops.operator(node) == "sdpa" and keeps_scores(node, eager=eager)]
    pairs = [_masks(node) if node.name in in_blocks else _pair(node) for node in cores]
    copied = max((_copied(node) for node in cores if node.name in in_blocks), default=0.0)
    widest = max((widest for _, widest in pairs), default=0.0)
    return Footprint(saved, live, sum(kept for kept, _ in pairs), widest, copied)


def _masks(core: fx.Node) -> tuple[float, float]:
    """Return the bytes per token and position of two masks, with and without a window, and of what they are made of."""
    tensor = tensor_of(core)
    return 0.0, 1.0 + 2 * (4 if tensor is None else tensor.element_size())


def _copied(core: fx.Node) -> float:
    """Return the bytes per position of keys and values that are repeated for all query heads, and filled up."""
    key, value = core.all_input_nodes[1:3]
    groups = float(ops.shape_of(core)[2]) / float(ops.shape_of(key)[1])
    return 2 * groups * (per_token(key) + per_token(value))


def _pair(core: fx.Node) -> tuple[float, float]:
    """Return the bytes per token and position that a core saves for backward, and holds at once.

    The softmax is in fp32 and saved, and so is its copy in the model's dtype. With sinks it is in the model's dtype.
    """
    tensor, heads = tensor_of(core), float(ops.shape_of(core)[2])
    item = 4 if tensor is None else tensor.element_size()
    if ops.attributes(core)["sinks"]:
        return heads * item, heads * 4 * item
    return heads * (item + 4), heads * (2 * item + 8)


def _with_gradient(graph: fx.GraphModule, adapters: Mapping[str, LoraBytes], hidden: int) -> set[fx.Node]:
    """Return the nodes whose value needs a gradient: floating-point values computed from hidden states."""
    trains = set[fx.Node]()
    for node in nodes_of(graph):
        tensor = tensor_of(node)
        floating = tensor is None or tensor.is_floating_point()
        if node.op == "placeholder":
            starts = tensor is not None and floating and ops.shape_of(node)[-1:] == (hidden,)
        else:
            starts = node.name in adapters or any(source in trains for source in node.all_input_nodes)
        if starts and floating and node.op not in ("get_attr", "output"):
            trains.add(node)
    return trains


def _saved_values(node: fx.Node, trains: set[fx.Node]) -> Iterator[fx.Node]:
    """Yield the values of the graph that the backward of `node` reads."""
    name = ops.operator(node)
    inputs = [source for source in node.all_input_nodes if source.op != "get_attr"]
    if name in _OWN_VALUE:
        yield inputs[0] if name in ("silu", "gelu", "softplus") else node
    elif name in _PRODUCTS:
        yield from (value for value in inputs if name == "div" or any(o in trains for o in inputs if o is not value))
    elif name == "sdpa":
        yield from (*inputs, node)
    elif name in ("topk", "gather", "max", "masked_fill", "select", "scatter"):
        yield from (value for value in inputs if value not in trains)  # indices and masks
    elif name not in _NOTHING and name not in ("linear", "rms_norm", "layer_norm"):
        yield from inputs  # an unknown operator: its inputs, as a safe estimate


def _saved_copies(node: fx.Node, adapter: LoraBytes | None) -> float:
    """Bytes per token that are saved beside values of the graph: casts, statistics and what adapters see."""
    name = ops.operator(node)
    if name in ("rms_norm", "layer_norm"):
        return elements_per_token(node) * 4  # the input in fp32
    if name == "sdpa":
        return float(ops.shape_of(node)[2]) * 4  # one log-sum-exp per head
    if adapter is None:
        return 0.0
    source = node.all_input_nodes[0]
    seen = elements_per_token(source)
    return seen * (adapter.item + adapter.mask) + adapter.rank * adapter.item


def _live(node: fx.Node) -> float:
    """Inputs and output of one operator, held at once."""
    if node.op in ("get_attr", "placeholder", "output") or ops.operator(node) in _VIEWS:
        return 0.0
    values = {_storage(source) for source in (*node.all_input_nodes, *_listed(node)) if source.op != "get_attr"}
    return per_token(node) + sum(map(per_token, values))


def _listed(node: fx.Node) -> list[fx.Node]:
    return nodes_in(node.args[0]) if node.args else []


def _storage(node: fx.Node) -> fx.Node:
    """Return the node that owns a value's memory, looking through views and the parts of a split."""
    while ops.operator(node) in _VIEWS or ops.operator(node) in ("getitem", "split", "slice"):
        sources = [source for source in node.all_input_nodes if source.op != "get_attr"]
        if not sources or (not per_token(sources[0]) and ops.operator(sources[0]) != "split"):
            break
        node = sources[0]
    return node


def per_token(node: fx.Node) -> float:
    """Bytes per token of a node's value, 0 where it has no size that grows with the tokens."""
    tensor = tensor_of(node)
    return 0.0 if tensor is None else elements_per_token(node) * tensor.element_size()


def elements_per_token(node: fx.Node) -> float:
    """Elements per token of a node's value, by the sizes that it was traced with."""
    shape = ops.shape_of(node)
    grows = any(isinstance(size, torch.SymInt) for size in shape)
    return prod(map(_traced, shape)) / _TOKENS if grows else 0.0


def _traced(size: Any) -> int:
    return int(cast("Any", size).node.hint) if isinstance(size, torch.SymInt) else int(size)

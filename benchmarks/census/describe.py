"""Describe a block's computation in words, from its captured graph, matched or not.

Input: graphs in normal form. Output: `sigmoid, + bias, grouped, top 4, renormalised, scaled`, `gated`, `mla`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

from torch import fx

from ktc.model.graph import ops
from ktc.model.graph.fold import tensor_inputs
from ktc.model.graph.typed import nodes_of

Kind = Literal["experts", "attention", "linear attention", "dense"]

_SCORES = ("softmax", "sigmoid", "softplus", "relu", "tanh", "exp")
# Options of an attention core, in words.
_CORE = (("sinks", "sinks"), ("mask", "own mask"), ("softcap", "soft cap"), ("bias", "position bias"))
_MIXERS = re.compile(r"attn|attention|mixer|mamba|ssm|conv|delta|recurrent|retention", re.IGNORECASE)


def experts_nodes(graph: fx.GraphModule) -> list[fx.Node]:
    """Return the routed experts of a block."""
    return [node for node in nodes_of(graph) if ops.operator(node) == "experts"]


def kind_of(graph: fx.GraphModule, name: str) -> Kind:
    """Return the kind of a captured block; `name` is its class name, which identifies other kinds of mixers."""
    operators = {ops.operator(node) for node in nodes_of(graph)}
    if "experts" in operators:
        return "experts"
    if "sdpa" in operators or (_MIXERS.search(name) and {"softmax", "matmul"} <= operators):
        return "attention"
    return "linear attention" if _MIXERS.search(name) else "dense"


def is_mixer(name: str) -> bool:
    """Return whether a block that could not be captured mixes positions, by its class name."""
    return _MIXERS.search(name) is not None


def router_words(experts: fx.Node) -> str:
    """Return how indices and weights of `experts` are computed from the hidden states."""
    hidden, *routing = _data_inputs(experts)[:3]
    region = _behind(routing) - _behind([hidden])
    found = {ops.operator(node) for node in region}
    topks = [node for node in region if ops.operator(node) == "topk"]
    words = [score for score in _SCORES if score in found]
    if topks and words and _only_after(region, words[0], topks):
        words[0] += " over the chosen"
    words += ["+ bias"] if any(_adds_weight(node) for node in region) else []
    words += ["grouped"] if len(topks) > 1 else []
    words.append(f"top {_top_k(experts)}")
    words += ["renormalised"] if any(_divides_by_sum(node) for node in region) else []
    words += ["scaled"] if any(_scales(node) for node in region) else []
    return ", ".join(words)


def shared_words(experts: fx.Node, beside: Sequence[str]) -> str:
    """Return `none`, `plain` or `gated`; `beside` are the dense blocks of the same layer."""
    routing = _behind(_data_inputs(experts)[:3]) | {experts}
    joined = _ahead(experts)
    others = {source for node in joined for source in tensor_inputs(node)} - joined - {experts}
    extra = _behind(others) - routing
    if any(ops.operator(node) == "linear" for node in extra):
        return "gated" if any(ops.operator(node) == "sigmoid" for node in extra) else "plain"
    return "plain, beside the block" if beside else "none"


def attention_words(graph: fx.GraphModule, latent: bool) -> str:
    """Return `gqa`, `mha` or `mqa` by the heads of the core, or `mla`; with the options of the core in brackets."""
    core = next(node for node in nodes_of(graph) if ops.operator(node) == "sdpa")
    heads, kv_heads = (int(ops.shape_of(operand)[1]) for operand in core.args[:2])
    kind = "mla" if latent else "mha" if heads == kv_heads else "mqa" if kv_heads == 1 else "gqa"
    about = ops.attributes(core)
    words = ["sliding"] * (int(about["window"]) >= 0) + [words for name, words in _CORE if about[name]]
    return f"{kind} ({', '.join(words)})" if words else kind


def _data_inputs(experts: fx.Node) -> list[fx.Node]:
    return [node for node in experts.args[:3] if isinstance(node, fx.Node)]


def _behind(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes and all their ancestors."""
    seen, waiting = set[fx.Node](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    return seen


def _ahead(node: fx.Node) -> set[fx.Node]:
    """Return all descendants of `node`."""
    seen, waiting = set[fx.Node](), list(node.users)
    while waiting:
        user = waiting.pop()
        if user not in seen:
            seen.add(user)
            waiting += user.users
    return seen


def _only_after(region: set[fx.Node], score: str, topks: list[fx.Node]) -> bool:
    """Return whether every `score` in `region` is computed from the output of a top-k."""
    return all(_behind([node]) & set(topks) for node in region if ops.operator(node) == score)


def _adds_weight(node: fx.Node) -> bool:
    return ops.operator(node) == "add" and any(_is_weight(source) for source in node.all_input_nodes)


def _is_weight(node: fx.Node) -> bool:
    while ops.operator(node) in ops.TRANSPARENT and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.op == "get_attr"


def _divides_by_sum(node: fx.Node) -> bool:
    return ops.operator(node) == "div" and any(
        "sum" in {ops.operator(source) for source in _near(divisor)} for divisor in node.all_input_nodes[1:]
    )


def _near(node: fx.Node, steps: int = 4) -> set[fx.Node]:
    """Return the ancestors within `steps` of `node`: a sum, its lower bound, and the layout operators around both."""
    found = {node}
    for _ in range(steps):
        found |= {source for each in found for source in each.all_input_nodes}
    return found


def _scales(node: fx.Node) -> bool:
    """Return whether `node` multiplies by a scalar or by a parameter."""
    scalar = any(isinstance(argument, int | float) for argument in node.args)
    return ops.operator(node) == "mul" and (scalar or any(_is_weight(source) for source in node.all_input_nodes))


def _top_k(experts: fx.Node) -> int:
    return int(ops.shape_of(experts.args[1])[-1])

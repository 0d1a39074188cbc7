"""What a block computes, in words: read from its captured graph, whether a pattern matched it or not.

In: graphs in normal form. Out: `sigmoid, + bias, grouped, top 4, renormalised, scaled`, `gated`, `mla`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

from torch import fx

from ktc.graph import ops
from ktc.graph.fold import tensor_inputs
from ktc.graph.typed import nodes_of

Kind = Literal["experts", "attention", "linear attention", "dense"]

_SCORES = ("softmax", "sigmoid", "softplus", "relu", "tanh", "exp")
_MIXERS = re.compile(r"attn|attention|mixer|mamba|ssm|conv|delta|recurrent|retention", re.IGNORECASE)


def experts_nodes(graph: fx.GraphModule) -> list[fx.Node]:
    """The routed experts of a block."""
    return [node for node in nodes_of(graph) if ops.operator(node) == "experts"]


def kind_of(graph: fx.GraphModule, name: str) -> Kind:
    """What a captured block is; `name` is that of its class, which tells mixers of other kinds."""
    operators = {ops.operator(node) for node in nodes_of(graph)}
    if "experts" in operators:
        return "experts"
    if "sdpa" in operators or (_MIXERS.search(name) and {"softmax", "matmul"} <= operators):
        return "attention"
    return "linear attention" if _MIXERS.search(name) else "dense"


def is_mixer(name: str) -> bool:
    """Whether a block that could not be captured mixes positions, by the name of its class."""
    return _MIXERS.search(name) is not None


def router_words(experts: fx.Node) -> str:
    """How indices and weights of `experts` come from the hidden states."""
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
    """`none`, `plain` or `gated`; `beside` are the dense blocks of the same layer."""
    routing = _behind(_data_inputs(experts)[:3]) | {experts}
    joined = _ahead(experts)
    others = {source for node in joined for source in tensor_inputs(node)} - joined - {experts}
    extra = _behind(others) - routing
    if any(ops.operator(node) == "linear" for node in extra):
        return "gated" if any(ops.operator(node) == "sigmoid" for node in extra) else "plain"
    return "plain, beside the block" if beside else "none"


def attention_words(graph: fx.GraphModule, latent: bool) -> str:
    """`gqa`, `mha` or `mqa` by the heads of the core, or `mla`; with a sliding window or sinks in brackets."""
    core = next(node for node in nodes_of(graph) if ops.operator(node) == "sdpa")
    heads, kv_heads = (int(ops.shape_of(operand)[1]) for operand in core.args[:2])
    kind = "mla" if latent else "mha" if heads == kv_heads else "mqa" if kv_heads == 1 else "gqa"
    about = ops.attributes(core)
    words = ["sliding"] * (int(about["window"]) >= 0) + ["sinks"] * bool(about["sinks"])
    return f"{kind} ({', '.join(words)})" if words else kind


def _data_inputs(experts: fx.Node) -> list[fx.Node]:
    return [node for node in experts.args[:3] if isinstance(node, fx.Node)]


def _behind(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes and everything that they are computed from."""
    seen, waiting = set[fx.Node](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    return seen


def _ahead(node: fx.Node) -> set[fx.Node]:
    """Everything that is computed from `node`."""
    seen, waiting = set[fx.Node](), list(node.users)
    while waiting:
        user = waiting.pop()
        if user not in seen:
            seen.add(user)
            waiting += user.users
    return seen


def _only_after(region: set[fx.Node], score: str, topks: list[fx.Node]) -> bool:
    """Whether every `score` in `region` is computed from what a top-k chose."""
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
    """The nodes up to `steps` before `node`: a sum, what keeps it from zero, and the layout around both."""
    found = {node}
    for _ in range(steps):
        found |= {source for each in found for source in each.all_input_nodes}
    return found


def _scales(node: fx.Node) -> bool:
    """Whether `node` multiplies by a number or by a parameter."""
    scalar = any(isinstance(argument, int | float) for argument in node.args)
    return ops.operator(node) == "mul" and (scalar or any(_is_weight(source) for source in node.all_input_nodes))


def _top_k(experts: fx.Node) -> int:
    return int(ops.shape_of(experts.args[1])[-1])

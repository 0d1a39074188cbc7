"""Reading a router: from a captured block to the `RouterForm` of its routing and the places of its tensors.

In: the graph of a block with routed experts. Out: a `RouterCode`. Refused, with the reason (`NotRead`): a routing that
`std/moe.ktr` does not describe, one in the code of the block itself, and code around the router's linear layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import torch
from torch import fx

from ktc.model.graph import ops
from ktc.model.graph.typed import input_of, tensor_of
from ktc.model.kernels.router_spec import RouterForm, Scoring

_SCORINGS: Final[dict[str, Scoring]] = {"softmax": "softmax", "sigmoid": "sigmoid", "sqrt": "sqrt_softplus"}
_THRESHOLD: Final = 20  # of PyTorch's softplus


class NotRead(Exception):
    """The router cannot be described; the message says why, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class RouterCode:
    """The routing of a router, and its places. FQNs are within the router's module, which is at `module` of the block.

    `layer` is the linear layer where that is a module, `weight` and `bias` the names of its tensors, `correction` the
    bias of the choice, "" without one. It is `passed` where the block hands it to each call. `experts` is the FQN of
    the experts in the block. Of the nodes, `logits` are what the linear layer computes, `corrections` the bias of the
    choice if there is one, `weights` and `indices` what the module returns.
    """

    form: RouterForm
    module: str
    layer: str
    weight: str
    bias: str
    correction: str
    passed: bool
    experts: str
    logits: fx.Node
    corrections: tuple[fx.Node, ...]
    weights: fx.Node
    indices: fx.Node


def read_router(node: fx.Node) -> RouterCode:
    """Return the router of the experts in the graph of `node`. Raises NotRead."""
    experts = next((n for n in _all_nodes(node.graph) if {"num_experts", "hidden"} <= ops.attributes(n).keys()), None)
    if experts is None:
        raise NotRead("no routed experts take its choice")
    chosen = _only(_behind(experts.args[1]), "getitem")
    topk = _only(input_of(chosen, 0), "topk")
    module = str(topk.meta.get("called", ""))
    if not module:
        raise NotRead("its routing is in the code of the block, not in a module of its own")
    if int(cast("int", chosen.args[1])) != 1 or not ops.works_along(topk, -1) or not ops.argument(topk, "largest"):
        raise NotRead(f"`{topk.name}` is not a choice of the greatest values of each token")
    return _Reader(experts, module, topk).read()


def _all_nodes(graph: fx.Graph) -> list[fx.Node]:
    return list(cast("Iterator[fx.Node]", iter(graph.nodes)))


def _returned(value: object, module: str) -> fx.Node:
    """Return the node that the module returns, behind what the block's code does with it: it may only be reshaped."""
    node = _node(value)
    while not is_inside(node, module):
        if ops.operator(node) not in ops.TRANSPARENT:
            raise NotRead(f"`{ops.operator(node)}` outside of the router changes its results")
        node = input_of(node, 0)
    return node


def is_inside(node: fx.Node, module: str) -> bool:
    """Return whether the code of the module at `module`, or of one below it, computes the node."""
    called = str(node.meta.get("called", ""))
    return called == module or called.startswith(f"{module}.")


def _node(value: object) -> fx.Node:
    if not isinstance(value, fx.Node):
        raise NotRead(f"`{value}` is in the place of a tensor")
    return value


def _behind(value: object) -> fx.Node:
    """Return the node that `value` is, behind what moves or casts it."""
    node = _node(value)
    while ops.operator(node) in ops.TRANSPARENT:
        node = input_of(node, 0)
    return node


def _only(node: fx.Node, operator: str) -> fx.Node:
    if ops.operator(node) != operator:
        raise NotRead(f"`{ops.operator(node)}` is in the place of `{operator}`")
    return node


def _dtype(node: fx.Node) -> torch.dtype:
    tensor = tensor_of(node)
    assert tensor is not None, f"`{node.name}` is a tensor"
    return tensor.dtype


def _constant(node: fx.Node) -> float | None:
    """Return the number by which a node multiplies, to which it adds or at which it clamps; None without one."""
    numbers = [a for a in ops.operands(node) if isinstance(a, int | float)]
    return float(numbers[0]) if len(numbers) == 1 else None


def _scaled(node: fx.Node) -> tuple[fx.Node, float]:
    """Return the value behind a multiplication by a number, and the number; 1 without one."""
    if ops.operator(node) != "mul" or (number := _constant(node)) is None:
        return node, 1.0
    return _behind(next(a for a in ops.operands(node) if isinstance(a, fx.Node))), number


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads from the results backwards. `topk` chooses for the node `experts`, in the module."""

    experts: fx.Node
    module: str
    topk: fx.Node

    def read(self) -> RouterCode:
        weights, indices = (_returned(self.experts.args[place], self.module) for place in (2, 1))
        last, scale = _scaled(_behind(weights))
        picked, total, constant = self._total(last)
        late = ops.operator(picked) in ("softmax", "sigmoid")
        scored = picked
        raw, picked_scale = (_behind(picked.args[0]), 1.0) if late else _scaled(picked)
        source, takes_limited = self._source(raw)
        choice = _behind(self.topk.args[0])
        limited, compared = self._limited(choice)
        corrected = _behind_sum(compared)
        scores = corrected[0] if corrected else compared
        if source is not None and source is not scores:
            raise NotRead("the weights are of other values than those that experts are chosen by")
        scored = scored if late else scores
        logits = scores if late else self._logits(scores)
        form = RouterForm(
            num_experts=int(ops.shape_of(scores)[-1]), top_k=int(ops.argument(self.topk, "k")),
            scoring=self._scoring(scored), late=late, corrected=corrected is not None,
            takes_limited=takes_limited and (limited is not None or corrected is not None),
            picked_scale=picked_scale, total=cast("Any", total), total_constant=constant, scale=scale,
            in_order=bool(ops.argument(self.topk, "sorted", True)),
        )  # fmt: skip
        if _dtype(_behind(weights)) != _dtype(scored):
            raise NotRead("it casts weights before they are complete")
        form = self._grouped(form, limited)
        return self._placed(form, logits, corrected[1] if corrected else None, (scored, compared, weights, indices))

    def _total(self, node: fx.Node) -> tuple[fx.Node, str, float]:
        """Return what a division by the sum of all weights divides, and how the sum is bounded."""
        if ops.operator(node) != "div":
            return node, "none", 0.0
        picked, total = (_behind(a) for a in ops.operands(node))
        how, constant = "plus", 0.0
        if ops.operator(total) in ("add", "clamp_min") and (number := _constant(total)) is not None:
            how, constant = ("plus" if ops.operator(total) == "add" else "at_least"), number
            total = _behind(next(a for a in ops.operands(total) if isinstance(a, fx.Node)))
        if ops.operator(total) != "sum" or not ops.works_along(total, -1) or _behind(total.args[0]) is not picked:
            raise NotRead("weights are divided by something else than their sum")
        return picked, how, constant

    def _source(self, raw: fx.Node) -> tuple[fx.Node | None, bool]:
        """Return the values that weights are gathered from, None with True for those that were compared."""
        if ops.operator(raw) == "getitem" and input_of(raw, 0) is self.topk and raw.args[1] == 0:
            return None, True
        _only(raw, "gather")
        indices = _behind(ops.argument(raw, "index"))
        if ops.operator(indices) != "getitem" or input_of(indices, 0) is not self.topk:
            raise NotRead("weights are gathered of other experts than the chosen ones")
        return _behind(raw.args[0]), False

    def _limited(self, choice: fx.Node) -> tuple[fx.Node | None, fx.Node]:
        """Return the limit to the best groups, if there is one, and what is compared."""
        if ops.operator(choice) != "masked_fill":
            return None, choice
        return choice, _behind(choice.args[0])

    def _logits(self, scores: fx.Node) -> fx.Node:
        """Return the logits behind scores of all experts."""
        if self._scoring(scores) == "sqrt_softplus":
            scores = _behind(scores.args[0])
        return _behind(scores.args[0])

    def _scoring(self, scores: fx.Node) -> Scoring:
        name = ops.operator(scores)
        if name not in _SCORINGS:
            raise NotRead(f"`{name}` is a scoring that kernels do not compute")
        if name == "softmax" and not ops.works_along(scores, -1):
            raise NotRead("its softmax is not over the experts of a token")
        if name == "sqrt":
            inner = _only(_behind(scores.args[0]), "softplus")
            if (ops.argument(inner, "beta", 1), ops.argument(inner, "threshold", _THRESHOLD)) != (1, _THRESHOLD):
                raise NotRead("its softplus has constants of its own")
        return _SCORINGS[name]

    def _grouped(self, form: RouterForm, limited: fx.Node | None) -> RouterForm:
        if limited is None:
            return form
        mask = _behind(_only(_behind(limited.args[1]), "logical_not").args[0])
        best = _behind(ops.argument(_only(mask, "scatter"), "index"))
        chosen = _only(input_of(_only(best, "getitem"), 0), "topk")
        rank = _behind(chosen.args[0])
        groups, top_groups = int(ops.shape_of(rank)[-1]), int(ops.argument(chosen, "k"))
        if ops.operator(rank) == "sum":
            pair = _only(input_of(_only(_behind(rank.args[0]), "getitem"), 0), "topk")
            if int(ops.argument(pair, "k")) != 2:
                raise NotRead(f"a group counts by its {ops.argument(pair, 'k')} best experts")
            score = "two_greatest"
        else:
            score = "greatest"
            _only(input_of(rank, 0) if ops.operator(rank) == "getitem" else rank, "max")
        value = float(ops.attributes(limited)["value"])
        return replace(
            form, groups=groups, top_groups=top_groups, group_score=score,
            limited=None if value == -torch.inf else value,
        )  # fmt: skip

    def _placed(
        self, form: RouterForm, logits: fx.Node, correction: fx.Node | None,
        values: tuple[fx.Node, fx.Node, fx.Node, fx.Node],
    ) -> RouterCode:  # fmt: skip
        """Return the code with the places of the tensors, and the dtypes in which it computes."""
        scored, compared, weights, indices = values
        if not is_inside(logits, self.module):
            raise NotRead("its linear layer is outside of the router")
        hidden, called = self._handed(logits.args[0]), str(logits.meta.get("called", ""))
        weight, bias = f"{called}.weight", None
        if logits.op != "call_module":  # which a layer with an adapter is
            _only(logits, "linear")
            weight, bias = str(_only(_behind(logits.args[1]), "weight").target), ops.argument(logits, "bias")
        if weight.rpartition(".")[0] != called:
            raise NotRead(f"its linear layer multiplies with `{weight}` of another module")
        layer = called.removeprefix(self.module).lstrip(".")
        name = "" if correction is None else str(_only(correction, "weight").target)
        passed = bool(name) and not name.startswith(f"{self.module}.")
        dtypes = _dtype(hidden), _dtype(logits), _dtype(scored), _dtype(compared), _dtype(weights)
        return RouterCode(
            _with_dtypes(form, dtypes), self.module, layer, weight.rpartition(".")[2],
            "" if bias is None or layer else str(_behind(bias).target).rpartition(".")[2],
            "" if passed else name.removeprefix(f"{self.module}."), passed, str(self.experts.meta.get("fqn", "")),
            logits, () if correction is None else (correction,), weights, indices,
        )  # fmt: skip

    def _handed(self, value: object) -> fx.Node:
        """Return the hidden states that the block hands to the module, which only moves and casts them."""
        node = _node(value)
        while is_inside(node, self.module):
            if ops.operator(node) not in ops.TRANSPARENT:
                raise NotRead(f"its module computes `{ops.operator(node)}` before its linear layer")
            node = input_of(node, 0)
        return node


def _behind_sum(compared: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return scores and the bias that is added to them, None without a bias."""
    if ops.operator(compared) != "add":
        return None
    sides = [_behind(a) for a in ops.operands(compared) if isinstance(a, fx.Node)]
    biases = [side for side in sides if ops.operator(side) == "weight"]
    if len(sides) != 2 or len(biases) != 1:
        raise NotRead("experts are chosen by a sum that is not of scores and a bias")
    return next(side for side in sides if side is not biases[0]), biases[0]


def _with_dtypes(form: RouterForm, dtypes: tuple[torch.dtype, ...]) -> RouterForm:
    """Return the form with the dtypes of hidden states, logits, scores, compared values and weights."""
    hidden, logits, scores, compared, weights = dtypes
    wide = torch.float32
    for dtype, known in ((logits, hidden), (scores, logits), (compared if form.corrected else wide, scores)):
        if dtype not in (known, wide):
            raise NotRead(f"it computes in {dtype}".replace("torch.", ""))
    if weights not in (scores, hidden):
        raise NotRead(f"its weights are {weights}".replace("torch.", ""))
    return replace(
        form,
        logits="fp32" if logits == wide != hidden else "",
        scores="fp32" if scores == wide != logits else "",
        compared="fp32" if form.corrected and compared == wide != scores else "",
        weights="hidden" if weights != scores else "",
    )

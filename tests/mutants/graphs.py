"""Mutants of rewritten graphs that replace the code of their block: those of lists of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import fx

from ktc.model.graph import ops
from ktc.model.graph.typed import input_of, nodes_of
from mutants.mutant import Mutant

aten: Final = torch.ops.aten
HIDDEN: Final = object()
Change = Callable[[fx.GraphModule], None]


def of(graph: fx.GraphModule, op: str, place: int = 0) -> list[fx.Node]:
    """Return the node of an operator in a list, empty for a graph of another block."""
    return [node for node in nodes_of(graph) if ops.name_of(node) == op][place:][:1]


def experts_of(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in nodes_of(graph) if node.op == "call_module" and str(node.target) in ("twigs", "pickers")]


def _only_with_experts(change: Change) -> Change:
    """Leave the graph of attention as it is."""
    return lambda graph: change(graph) if experts_of(graph) else None


def by_input(op: str, place: int = 0, argument: int = 0) -> Change:
    """Replace a node by one of its inputs."""

    def change(graph: fx.GraphModule) -> None:
        for node in of(graph, op, place):
            node.replace_all_uses_with(input_of(node, argument))

    return change


def argument(op: str, position: int, value: Any, place: int = 0) -> Change:
    """Replace an argument of a node."""

    def change(graph: fx.GraphModule) -> None:
        for node in of(graph, op, place):
            node.update_arg(position, value)

    return change


def target(op: str, new: Any, place: int = 0, args: Sequence[Any] = ()) -> Change:
    """Replace the operator of a node, and append arguments."""

    def change(graph: fx.GraphModule) -> None:
        for node in of(graph, op, place):
            node.target, node.args = new, (*node.args, *args)

    return change


def operand(position: int, new: Any, *args: Any) -> Change:
    """Put an operator between the experts and one of their operands: hidden states, indices, weights."""

    def change(graph: fx.GraphModule) -> None:
        for node in experts_of(graph):
            old = input_of(node, position)
            with graph.graph.inserting_before(node):
                made = graph.graph.call_function(new, (old, *args))
            made.meta = dict(old.meta)
            node.update_arg(position, made)

    return change


def result(new: Any, *args: Any) -> Change:
    """Put an operator behind the experts; `HIDDEN` among the arguments is their hidden states."""

    def change(graph: fx.GraphModule) -> None:
        for node in experts_of(graph):
            with graph.graph.inserting_after(node):
                made = graph.graph.call_function(new, (node, *(node.args[0] if a is HIDDEN else a for a in args)))
            _others_use(node, made)

    return change


def _others_use(node: fx.Node, made: fx.Node) -> None:
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def weights_of_corrected_scores(graph: fx.GraphModule) -> None:
    for node in of(graph, "gather"):
        node.update_arg(0, of(graph, "add")[0])


def second_output(change: Callable[[fx.GraphModule, fx.Node], fx.Node | None]) -> Change:
    """Replace the second output, by nothing for None."""

    def changed(graph: fx.GraphModule) -> None:
        output = nodes_of(graph)[-1]
        first, second = output.args[0]  # type: ignore[misc]
        with graph.graph.inserting_before(output):
            new = change(graph, second)  # type: ignore[arg-type]
        output.args = ((first,) if new is None else (first, new),)

    return changed


_ROWS: tuple[tuple[str, str, Change, str], ...] = (
    # The router
    ("scaling dropped", "hedge", by_input("mul", 1), ""),
    ("scaling 1 % larger", "hedge", argument("mul", 1, 2.525, 1), ""),
    ("renormalisation dropped", "hedge", by_input("div"), ""),
    ("renormalisation dropped, softmax", "orchard", by_input("div"), ""),
    ("renormalisation over all experts", "hedge", lambda g: of(g, "sum")[0].update_arg(0, of(g, "sigmoid")[0]), ""),
    ("epsilon of the sum dropped", "hedge", argument("add", 1, 0.0, 1), "a sum of sigmoids is far from 1e-20"),
    ("epsilon of the sum 1e-3", "hedge", argument("add", 1, 1e-3, 1), ""),
    ("correction dropped", "hedge", by_input("add"), ""),
    ("correction subtracted", "hedge", target("add", aten.sub.Tensor), ""),
    ("weights of corrected scores", "hedge", weights_of_corrected_scores, ""),
    ("limit of groups dropped", "hedge", by_input("masked_fill"), ""),
    ("one more group", "hedge", argument("topk", 1, 3), ""),
    ("closed groups opened", "hedge", lambda g: of(g, "logical_not")[0].replace_all_uses_with(of(g, "cast")[0]), ""),
    ("score of a group by its sum", "hedge", target("max", aten.sum.dim_IntList), ""),
    ("sigmoid -> softmax", "hedge", target("sigmoid", aten.softmax.int, args=(-1,)), ""),
    ("softmax over tokens", "orchard", argument("softmax", 1, 0), ""),
    ("softmax after top-k as well", "orchard", operand(2, aten.softmax.int, -1), ""),
    ("top_k one less", "orchard", argument("topk", 1, 1), ""),
    ("top_k one more", "hedge", argument("topk", 1, 5, 1), ""),
    ("the smallest scores chosen", "hedge", lambda g: of(g, "topk", 1)[0].update_arg(3, False), ""),
    ("choices sorted", "hedge", lambda g: of(g, "topk", 1)[0].update_arg(4, True),
     "the sum over a token's choices does not depend on their order, up to rounding"),
    # The experts' operands and result
    ("weights of other tokens", "hedge", operand(2, aten.roll.default, [1], [0]), ""),
    ("weights of other choices", "orchard", operand(2, aten.flip.default, [-1]), ""),
    ("weights detached", "orchard", operand(2, aten.detach.default), ""),
    ("expert numbers moved", "hedge", operand(1, aten.bitwise_xor.Scalar, 1), ""),
    ("hidden states detached", "orchard", operand(0, aten.detach.default), ""),
    ("output detached", "orchard", result(aten.detach.default), ""),
    ("residual added", "orchard", result(aten.add.Tensor, HIDDEN), ""),
    ("routed part twice", "hedge", result(aten.mul.Tensor, 2.0), ""),
    ("NaN removed", "orchard", result(aten.nan_to_num.default), ""),
    ("routed part limited", "orchard", result(aten.clamp.default, -1000.0, 1000.0), ""),
    ("a copy of the result", "orchard", result(aten.clone.default), "a copy has the same values and gradients"),
    # The part beside the experts
    ("shared expert dropped", "hedge", by_input("add", 2), ""),
    ("gate of the shared expert dropped", "hedge", by_input("mul", 3, 1), ""),
    ("gate of the shared expert without sigmoid", "hedge", by_input("sigmoid", 1), ""),
    ("activation of the shared expert", "hedge", target("silu", aten.gelu.default), ""),
    ("routed part dropped", "hedge", result(aten.mul.Tensor, 0.0), ""),
    ("second output dropped", "orchard", second_output(lambda g, n: None), ""),
    ("second output detached", "orchard", second_output(
        lambda g, n: g.graph.call_function(aten.detach.default, (n,))), ""),
    ("second output after softmax", "orchard", second_output(lambda g, n: of(g, "softmax")[0]), ""),
)  # fmt: skip
MUTANTS = tuple(Mutant(name, model, "graph", _only_with_experts(change), why) for name, model, change, why in _ROWS)

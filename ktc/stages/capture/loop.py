"""Capture a block that loops over a list of experts: its graph with one `experts` node, and the list's contents.

Input: a block on meta tensors and its call. Output: the graph in normal form. It returns everything that the block
returns, since it replaces the block's own code at run time. Refused, with the reason: a loop that is more than routing,
a block that computes something else in training or on long inputs, one that does more than return a result, a block
called with more than hidden states. Experts that differ in more than their tensors, or hold more than their matrices,
are refused too.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn

from ktc.model.experts.private_api import pytree
from ktc.model.graph.typed import nodes_of
from ktc.model.linears.plain import has_hooks
from ktc.stages.capture import states
from ktc.stages.capture.canonical import NoExperts, canonicalise, same_computation
from ktc.stages.capture.circumstances import Inside, dependence
from ktc.stages.capture.expert_list import candidates, expert_list
from ktc.stages.capture.export import BATCH, SEQUENCE, SizeBranch, export_block
from ktc.stages.capture.identity import LONG, expert_traces, resized
from ktc.stages.capture.normal_form import normalise
from ktc.stages.capture.record import Call
from ktc.stages.capture.side_effects import side_effect
from ktc.stages.capture.states import Given
from ktc.stages.capture.trace import MODES, traced, training_mode, without_sizes
from ktc.stages.capture.types import ExpertList
from ktc.stages.capture.unrolled import all_experts_routed

_SIZES = ((BATCH, SEQUENCE), (1, 1), (BATCH, LONG))  # of calls on which a block must run the same operators


def capture_loop(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[fx.GraphModule, ExpertList] | None:
    """Return the graph and the experts, or None for a block without a list of experts.

    Raises NoExperts and the exceptions of torch.export.
    """
    lists = dict(candidates(block))
    leaves = pytree.tree_leaves((args, kwargs))
    if not lists or not isinstance(leaves[0], Tensor):
        return None
    read = (expert_list(fqn, modules, int(leaves[0].shape[-1])) for fqn, modules in lists.items())
    experts = [experts for experts in read if experts is not None]
    if not experts:
        return None
    if len(experts) > 1:
        raise NoExperts(f"it has {len(experts)} lists of experts, `{experts[0].fqn}` and `{experts[1].fqn}`")
    if len(leaves) > 1 or "hidden_states" not in {"hidden_states" if args else "", *kwargs}:
        raise NoExperts("it is called with more than hidden states")
    modules = lists[experts[0].fqn]
    _require_no_more(modules, experts[0])
    _require_equal(modules, (args, kwargs))
    _require_any_length(block, (args, kwargs), modules)
    graph = _captured(block, args, kwargs, modules, experts[0])
    with training_mode(block, True):
        trained = _captured(block, args, kwargs, modules, experts[0])
    if not same_computation(graph, trained):
        raise NoExperts("it computes something else in training mode")
    _require_independent(block, (args, kwargs), modules)
    return graph, experts[0]


def _require_no_more(modules: nn.ModuleList, experts: ExpertList) -> None:
    """Require that the list holds no tensor but the matrices: the stack that replaces it has no place for others."""
    taken = {f"{number}.{name}" for number in range(experts.count) for name in experts.parts.values()}
    more = next((name for name in modules.state_dict() if name not in taken), "")
    if more:
        raise NoExperts(f"`{experts.fqn}` holds `{more}` beside the matrices of its experts")


def _require_equal(modules: nn.ModuleList, call: Call) -> None:
    """Require that all experts compute the same function of their tensors, and the same in training."""
    plain = _behaviours(modules, call)
    with training_mode(modules, True):
        trained = _behaviours(modules, call)
    if plain != trained:
        raise NoExperts("its experts compute something else in training mode")
    if len(plain) > 1:
        raise NoExperts("its experts compute different functions")
    odd = next((type(m).__name__ for expert in modules for m in expert.modules() if has_hooks(m)), "")
    if odd:
        raise NoExperts(f"hooks on `{odd}` are called with its experts")


def _require_any_length(block: nn.Module, call: Call, modules: nn.ModuleList) -> None:
    """Require the same operators for one token, for some and for many, and with frozen parameters.

    Export keeps one branch on each of them.
    """
    for module in (block, modules):
        plain = _operators(block, modules, call, module is block)
        with states.frozen.around(block):
            if _operators(block, modules, call, module is block) != plain:
                raise NoExperts("its code depends on which of its parameters are trained")
        what = "it computes" if module is block else "its experts compute"
        for training in (block.training, True):
            with training_mode(block, training):
                ran = [_operators(block, modules, resized(call, *sizes), module is block) for sizes in _SIZES]
                if any(other != ran[0] for other in ran):
                    raise NoExperts(f"{what} something else for calls of another length")
                for of_torch in MODES:
                    with of_torch():
                        again = _operators(block, modules, resized(call, *_SIZES[0]), module is block)
                    if again != ran[0]:
                        raise NoExperts(f"{what} something else in inference mode or with autocast")


def _require_independent(block: nn.Module, call: Call, modules: nn.ModuleList) -> None:
    """Require that the block and its experts compute the same in all circumstances about which they may ask."""
    hidden = next(leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor))

    def whole(given: Given, inside: Inside) -> object:
        args, kwargs = pytree.tree_map_only(Tensor, given, call)
        with all_experts_routed(modules), inside():
            return block(*args, **kwargs)

    def alone(given: Given, inside: Inside) -> object:
        with inside():
            return [expert(given(hidden.flatten(0, -2))) for expert in modules]

    for module, run in ((block, whole), (modules, alone)):
        if reason := dependence(module, run):
            raise NoExperts(reason)


def _operators(block: nn.Module, modules: nn.ModuleList, call: Call, whole: bool) -> list[list[str]]:
    if not whole:
        return [without_sizes(trace) for trace in expert_traces(modules, call)][:1]
    with all_experts_routed(modules):
        return [without_sizes(traced(block, lambda: block(*call[0], **call[1])))]


def _behaviours(modules: nn.ModuleList, call: Call) -> set[tuple[str, ...]]:
    return {tuple(trace) for trace in expert_traces(modules, call)}


def _captured(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], modules: nn.ModuleList, experts: ExpertList
) -> fx.GraphModule:
    def run() -> object:
        with all_experts_routed(modules):
            return block(*args, **kwargs)

    if reason := side_effect(block, run):
        raise NoExperts(reason)
    try:
        graph = export_block(block, args, kwargs, lambda: all_experts_routed(modules), whole=True)
    except SizeBranch as error:
        raise NoExperts(str(error)) from error
    canonicalise(graph, experts)
    if any(str(node.target).startswith("constants.") for node in nodes_of(graph) if node.op == "get_attr"):
        raise NoExperts("it computes with a tensor that it creates itself")
    return normalise(graph)

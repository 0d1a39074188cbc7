"""Mutants of what capture and plan recognise: forms, parts of a list's experts, equal blocks, places of actions.

The model is captured and planned again inside each change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import ktc.stages.capture.expert_body
import ktc.stages.capture.loop
import ktc.stages.capture.markers
import ktc.stages.capture.model
from ktc.model.graph import ops
from ktc.model.kernels.form import ExpertsForm
from ktc.model.targets.target import NodeAction
from ktc.stages.capture import ExpertList
from ktc.stages.plan import BlockRewrite, Plan
from mutants import models
from mutants.mutant import Mutant

Change = Callable[[], AbstractContextManager[Any]]


def stage(module: Any, name: str, change: Callable[[Any], Any]) -> Change:
    """Return the change of what a function of a stage returns."""

    @contextmanager
    def changed() -> Iterator[None]:
        stock = getattr(module, name)
        with mock.patch.object(module, name, lambda *args, **kwargs: change(stock(*args, **kwargs))):
            yield

    return changed


def form(old: str, new: str) -> Change:
    """Return the change of the form that is read from an experts module."""
    return stage(ktc.stages.capture.markers, "form_of", lambda text: re.sub(old, new, text))


def expert_list(change: Callable[[ExpertList], ExpertList]) -> Change:
    """Return the change of what is read from a list of experts; other lists stay none."""
    return stage(ktc.stages.capture.loop, "expert_list", lambda found: found and change(found))


def parts(**names: str) -> Callable[[ExpertList], ExpertList]:
    return lambda found: replace(found, parts={**found.parts, **names})


def equal_blocks(kind: str) -> Change:
    """Take all blocks of a class for the same one."""

    @contextmanager
    def changed() -> Iterator[None]:
        stock = ktc.stages.capture.model.identity_of

        def identity_of(block: Any, *rest: Any) -> object:
            return kind if type(block).__name__ == kind else stock(block, *rest)

        with mock.patch.object(ktc.stages.capture.model, "identity_of", identity_of):
            yield

    return changed


def actions(change: Callable[[BlockRewrite], BlockRewrite]) -> Change:
    """Return the change of the plan's rewrites."""

    def changed(found: tuple[object, Plan]) -> tuple[object, Plan]:
        matches, plan = found
        return matches, replace(plan, rewrites=tuple(map(change, plan.rewrites)))

    return stage(models, "planned", changed)


def linear_actions(change: Callable[[tuple[NodeAction, ...]], tuple[NodeAction, ...]]) -> Change:
    """Return the change of the actions of blocks without experts."""

    def changed(rewrite: BlockRewrite) -> BlockRewrite:
        fused = any(action.target.takes_experts for action in rewrite.actions)
        return rewrite if fused else replace(rewrite, actions=change(rewrite.actions))

    return actions(changed)


def fqns_exchanged(found: tuple[NodeAction, ...]) -> tuple[NodeAction, ...]:
    first, second, *others = found
    return (replace(first, fqn=second.fqn), replace(second, fqn=first.fqn), *others)


def one_fqn(found: tuple[NodeAction, ...]) -> tuple[NodeAction, ...]:
    return tuple(replace(action, fqn=found[0].fqn) for action in found)


def operands(change: Callable[[list[Any]], list[Any]]) -> Change:
    """Return the change of the operands that the experts' node of a loop gets."""

    @contextmanager
    def changed() -> Iterator[None]:
        stock = ktc.stages.capture.loop.canonicalise

        def canonicalise(graph: Any, experts: ExpertList) -> None:
            stock(graph, experts)
            for node in graph.graph.nodes:
                if node.target is ops.experts:
                    node.args = tuple(change(list(node.args)))

        with mock.patch.object(ktc.stages.capture.loop, "canonicalise", canonicalise):
            yield

    return changed


def stacks_exchanged(args: list[Any]) -> list[Any]:
    """Put the form's other spelling, with gate and up alternating."""
    return [*args[:5], f"{args[5]} interleaved", *args[6:]]


def _activation(found: ExpertsForm | None) -> ExpertsForm | None:
    return found and replace(found, activation=replace(found.activation, function="gelu"))


_LIST_CODE = ktc.stages.capture.expert_body
_LINEARS = "linear layers are only wrapped: the same computation, in another order"
_ROWS: tuple[tuple[str, str, Change, str], ...] = (
    ("a form with silu for gelu", "basalt", form("^gelu", "silu"), ""),
    ("a form without biases", "basalt", form(" biased", ""), ""),
    ("a form with gate and up interleaved", "slopes", form("$", " interleaved"), ""),
    ("a form without its limit", "slopes", form(r"\(limit=.*\)", ""), ""),
    ("a form with twice the limit", "slopes", form("limit=7.0", "limit=14.0"), ""),
    ("a form with a limit that stock lacks", "basalt", form("^gelu", "gelu(limit=1000.0)"), ""),
    ("a form with relu for relu2", "nemotron_h", form("relu2", "relu"), ""),
    ("a form without offset", "gpt_oss", form(", up_offset=1.0", ""), ""),
    ("a form without alpha", "minimax_m3_vl_text", form("alpha=1.702, ", ""), ""),
    ("silu for gelu_tanh, beside their router", "gemma4_text", form("gelu_tanh", "silu"), ""),
    ("gelu for gelu_tanh, beside their router", "gemma4_text", form("gelu_tanh", "gelu"), ""),
    ("interleaved, beside their router", "gemma4_text", form("$", " interleaved"), ""),
    ("gate and up of a list exchanged", "orchard", expert_list(parts(gate="w3.weight", up="w1.weight")), ""),
    ("gate of a list twice", "orchard", expert_list(parts(up="w1.weight")), ""),
    ("down of a list from gate", "orchard", expert_list(parts(down="w1.weight")), ""),
    ("a list with another activation", "orchard", stage(_LIST_CODE, "form_of_code", _activation), ""),
    ("a list with interleaved halves", "orchard", operands(stacks_exchanged), ""),
    ("a list with fewer experts", "orchard", expert_list(lambda found: replace(found, count=found.count - 1)), ""),
    ("a list of other widths", "orchard", expert_list(lambda found: replace(found, intermediate=32)), ""),
    ("layers with other limits treated as one", "slopes", equal_blocks("Slope"), ""),
    ("windowed and full attention treated as one", "gpt_oss", equal_blocks("GptOssAttention"), _LINEARS),
    ("actions at exchanged places", "qwen2_moe", linear_actions(fqns_exchanged), _LINEARS),
    ("actions at one place", "qwen2_moe", linear_actions(one_fqn), ""),
)  # fmt: skip
MUTANTS = tuple(Mutant(name, model, "recognised", change, why) for name, model, change, why in _ROWS)

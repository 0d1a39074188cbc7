"""`lora_experts` claims -> the weights of routed experts that PEFT adapts by name, with their ranks.

Refused (M076): experts that no kernel runs, or that the model keeps one by one or in another layout; gate without up
where they are one weight; a rank that the kernels do not take.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, cast

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.experts.layouts.stock_layout import stock_names, stock_shape
from ktc.model.experts.trained.lora import MAX_RANK
from ktc.model.graph import ops
from ktc.model.graph.typed import nodes_by_name
from ktc.model.kernels.form import parse_form
from ktc.model.targets import TARGETS, LoraExperts
from ktc.model.targets.node_plan import Claim
from ktc.model.targets.target import Target
from ktc.stages.capture import CapturedModel
from ktc.stages.capture.types import ModuleInfo

_HOSTS: Final = tuple(name for name, target in TARGETS.items() if target.module and LoraExperts.name in target.fuses)
_NO_KERNEL: Final = (
    f"no rule with `{'` or `'.join(_HOSTS)}` runs these experts, "
    "and without its kernel they would be copied to be adapted"
)
_OWN_CODE: Final = "they are a module of the model's own code, whose adapters are not compared with stock PEFT's"
_PARTS: Final = {"gate_up_proj": ("gate", "up"), "up_proj": ("up",), "down_proj": ("down",)}


@dataclass(frozen=True, slots=True)
class AdaptedWeight:
    """A weight of all experts of a layer: how many, and the inputs and outputs of each (in no order)."""

    fqn: str
    claim: Claim
    num_experts: int
    sizes: tuple[int, int]


def adapted_weights(captured: CapturedModel, claims: Sequence[Claim]) -> tuple[AdaptedWeight, ...]:
    """Return the weights that `lora_experts` names, in the order of the layers. Raise InputRefused (M076)."""
    on_kernel = {claim.path for claim in claims if claim.target.name in _HOSTS}
    modules = {module.fqn: module for module in captured.modules}
    weights, problems = list[AdaptedWeight](), dict[str, Diagnostic]()
    for claim in claims:
        if claim.target.adapts != "experts":
            continue
        module = modules.get(claim.path)
        why = "" if claim.path in on_kernel else _NO_KERNEL
        why = why or _unsuited(claim.target, module) or _other_layout(captured, claim, module)
        if why:
            message = f"`{LoraExperts.name}` on `{claim.path}`: {why}"
            problems.setdefault(why, Diagnostic("M076", message, claim.span, hint=_hint(why)))
        elif module is not None:
            weights += _weights(claim, claim.target, module)
    if problems:
        raise InputRefused(*problems.values())
    return tuple(weights)


def _weights(claim: Claim, target: Target, module: ModuleInfo) -> Iterator[AdaptedWeight]:
    for tensor in module.tensors:
        if _is_adapted(target, tensor.name):
            num_experts, *sizes = tensor.shape
            yield AdaptedWeight(f"{claim.path}.{tensor.name}", claim, num_experts, (sizes[0], sizes[1]))


def _is_adapted(target: Target, name: str) -> bool:
    return any(part in _targets(target) for part in _PARTS.get(name, ()))


def _targets(target: Target) -> tuple[str, ...]:
    """Return the matrices of an expert that are adapted."""
    return cast("tuple[str, ...]", target.settings["targets"])


def _unsuited(target: Target, module: ModuleInfo | None) -> str:
    """Return why the target is impossible for experts that a kernel runs, "" if it is possible."""
    names = {tensor.name for tensor in module.tensors} & _PARTS.keys() if module is not None else set[str]()
    targets, rank = set(_targets(target)), target.settings["rank"]
    if not names:
        return (
            "the model keeps its experts in a list of modules, where PEFT names every expert's linear layers; "
            "compiled they are one node, in which there are no such layers to adapt"
        )
    if "gate_up_proj" in names and len(targets & {"gate", "up"}) == 1:
        return "gate and up are one weight here, which has one adapter"
    if not any(_is_adapted(target, name) for name in names):
        return f"these experts have none of {', '.join(sorted(targets))}"
    if isinstance(rank, int) and rank > MAX_RANK:
        return f"rank {rank}, of which the kernels take {MAX_RANK} at most"
    return ""


def _other_layout(captured: CapturedModel, claim: Claim, module: ModuleInfo | None) -> str:
    """Return why an adapter of the compiled experts is not one of the model's own weights, "" if it is.

    Code of the model's own may keep more rows than experts, or its matrices the other way round.
    """
    block = captured.block(claim.block)
    if block.own_experts:
        return _OWN_CODE
    graph = block.graph
    assert graph is not None and module is not None, "a claimed node is in a captured block"
    about = ops.attributes(nodes_by_name(graph)[claim.node])
    form = parse_form(str(about["form"]))
    sizes = int(about["num_experts"]), int(about["hidden"]), int(about["inter"])
    shapes = {tensor.name: tuple(tensor.shape) for tensor in module.tensors}
    for name in stock_names(form):
        if name in _PARTS and shapes.get(name, ()) != stock_shape(form, name, *sizes):
            return f"`{name}` is not kept as the kernel's experts, so an adapter would fit only one of the two"
    return ""


def _hint(why: str) -> str:
    for word, hint in (
        ("rank", f"write `rank = {MAX_RANK}` or less"),
        ("without its kernel", f"add `=> {_HOSTS[0]}()` to the rule"),
        ("gate and up", "name both in `targets`, or neither"),
    ):
        if word in why:
            return hint
    return "leave it out of the rule"

"""Weights that are rounded or train: claims of `fake_quant`, `quantize` and `train` -> each node's `NodeWeights`.

A weight has one of three meanings: frozen and rounded once, trained and rounded after each step, or merged with its
adapter and rounded after each step. A program rounds the base or the sum of base and adapter, not both: an adapter of
the one is another function on the other.
Refused: what cannot be rounded (M085), and what cannot train (M086).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import fx, nn

from ktc.diagnostics import Diagnostic, InputRefused, Span
from ktc.language.dsl.ruleset import RuleSet
from ktc.model.experts.layouts.stock_layout import stock_names, stock_shape
from ktc.model.graph import ops
from ktc.model.graph.typed import nodes_by_name
from ktc.model.kernels.form import parse_form
from ktc.model.linears.plain import is_plain_linear
from ktc.model.targets import FakeQuant
from ktc.model.targets.node_plan import Claim
from ktc.model.targets.quantisation import Quantisation
from ktc.model.targets.target import AS_STORED, NodeWeights, Target
from ktc.stages.capture import CapturedModel
from ktc.stages.plan.collapse import collapse
from ktc.stages.plan.draft import PlanDraft
from ktc.stages.plan.types import Reason

_KEEP = "leave it out of the rule"
_OWN_FORMATS = ("stored", "bf16", "int4")  # of `cpu_moe`, that a grid of INT4 replaces


def plan_weights(draft: PlanDraft) -> PlanDraft:
    """Decide what becomes of every weight that a rule rounds or trains. Raises InputRefused (M085, M086).

    `train` claims whole modules afterwards where no module of ktc trains them.
    """
    captured = draft.captured
    resolved = dict.fromkeys(_resolved(captured, claim, draft.claims) for claim in draft.claims)
    standing = tuple(claim for claim in resolved if claim is not None)
    rounding = [claim for claim in standing if claim.target.rounding]
    training = [claim for claim in standing if claim.target.trains_weights]
    problems = [
        *_refused("M085", {claim: _not_rounded(captured, claim, standing, draft.rules) for claim in rounding}),
        *_mixed(rounding),
        *_refused("M086", {claim: _not_trained(captured, claim, standing) for claim in training}),
    ]
    if problems:
        raise InputRefused(*problems)
    treatments: dict[str, NodeWeights] = {}
    for claim in rounding:
        if grid := claim.target.rounding:
            treatments[claim.path] = NodeWeights(grid.grid, merged=grid.merges)
    for claim in training:
        if claim.node:
            masters = str(claim.target.settings["masters"] or "fp32")
            treatments[claim.path] = replace(treatments.get(claim.path, AS_STORED), masters=masters)
    modules = tuple(dict.fromkeys(claim.path for claim in training))
    decided = replace(draft, claims=standing, treatments=treatments, trained_modules=modules)
    return decided.with_reasons(*_reasons(rounding, training, treatments))


def _resolved(captured: CapturedModel, claim: Claim, claims: Sequence[Claim]) -> Claim | None:
    """Return the claim, on the whole module where `train` names a node that no module of ktc replaces.

    A pattern captures values too, such as a router's scores; a module without parameters of its own is none to train.
    """
    if not claim.target.trains_weights or not claim.node:
        return claim
    if _operator(captured, claim) == "linear" and _is_linear(captured, claim.path):
        return claim
    if _operator(captured, claim) == "experts" and _kernel(claim, claims):
        return claim
    module = _module(captured, claim.path)
    if module is None or not any(True for _ in module.parameters(recurse=False)):
        return None
    return replace(claim, node="")


# What cannot be done -------------------------------------------------------------------------------------------------
_Why = tuple[str, str] | None  # what is wrong, and what to write instead


def _refused(code: str, problems: Mapping[Claim, _Why]) -> Iterator[Diagnostic]:
    """Yield a diagnostic for each action and reason, with all modules that it concerns."""
    paths: dict[tuple[Span, str, str, str], list[str]] = {}
    for claim, problem in problems.items():
        if problem is not None:
            paths.setdefault((claim.span, claim.target.name, *problem), []).append(claim.path)
    for (span, name, why, hint), modules in paths.items():
        yield Diagnostic(code, f"`{name}` on `{collapse(modules)}`: {why}", span, hint=hint)


def _not_rounded(captured: CapturedModel, claim: Claim, claims: Sequence[Claim], rules: RuleSet) -> _Why:
    grid = claim.target.rounding
    assert grid is not None, "the claim rounds weights"
    return _unsuited(captured, claim, grid, claims) or _unmerged(claim, grid, claims, rules)


def _unsuited(captured: CapturedModel, claim: Claim, target: Quantisation, claims: Sequence[Claim]) -> _Why:
    if captured.model.dtype == torch.float16:
        return (
            "the model is in fp16, and kernels round weights and scales to bf16: files would have others",
            "save the checkpoint in bf16 first",
        )
    kind = _operator(captured, claim) if claim.node else ""
    if kind == "experts":
        kernel = _kernel(claim, claims)
        if kernel is None:
            return "no rule with `cpu_moe` runs these experts", "add `=> cpu_moe()` to the rule"
        if (stored := kernel.settings.get("format", "stored")) not in _OWN_FORMATS:
            return f"`{kernel.name}(format = {stored})` stores them on another grid", "write `format = stored` there"
        about = ops.attributes(nodes_by_name(_graph(captured, claim))[claim.node])
        sizes = {"hidden": int(about["hidden"]), "intermediate": int(about["inter"])}
    elif kind == "linear" and _is_linear(captured, claim.path):
        sizes = {"in_features": captured.model.get_submodule(claim.path).get_parameter("weight").shape[1]}
    else:
        return "it is neither a linear layer nor experts of a captured block", "name the projections with `on`"
    if target.group not in target.group_sizes:
        return f"no kernel has groups of {target.group} weights", "write `group = 32`, 64 or 128, or -1 for a row"
    if target.group > 0 and (odd := {name: size for name, size in sizes.items() if size % target.group}):
        name, size = next(iter(odd.items()))
        return f"groups of {target.group} do not divide {name} = {size}", "choose another `group`, or -1 for a row"
    if target.packs_weights and (adapter := _adapter(claim, claims)):
        return f"`{adapter.target.name}` trains on it", f"write `{FakeQuant.name}` instead"
    return None


def _unmerged(claim: Claim, target: Quantisation, claims: Sequence[Claim], rules: RuleSet) -> _Why:
    """Return why an adapter cannot be merged before rounding, `None` if it can or need not be."""
    if not target.merges:
        return None
    adapter = _adapter(claim, claims)
    if adapter is None or adapter.target.trains_weights:
        return "`weights = merged` rounds the sum of a frozen base and an adapter, and it has none", "leave it out"
    dropout = adapter.target.settings.get("dropout")
    if dropout or (dropout is None and rules.lora.get("dropout")):
        return "an adapter with dropout cannot be merged in every step", "write `dropout = 0` in the `lora` block"
    if kernel := next((o.target for o in claims if o.target.fixed_weights and _same(claim, o)), None):
        return f"`{kernel.name}` multiplies a weight that does not change", "leave the kernel out"
    return _elsewhere(claim, claims)


def _mixed(rounding: Sequence[Claim]) -> Iterator[Diagnostic]:
    """Yield a problem for a program that rounds the base here and the merged sum there."""
    by_meaning = {claim.target.settings.get("weights"): claim for claim in reversed(rounding)}
    merged, base = by_meaning.get("merged"), by_meaning.get("base")
    if merged is not None and base is not None:
        message = f"`{FakeQuant.name}` rounds the base of `{base.path}` and the merged weights of `{merged.path}`"
        hint = "write the same `weights` in both: an adapter that is served beside INT4 is not merged into it"
        yield Diagnostic("M085", message, merged.span, hint=hint)


def _not_trained(captured: CapturedModel, claim: Claim, claims: Sequence[Claim]) -> _Why:
    module = _module(captured, claim.path)
    if module is None or not any(True for _ in module.parameters()):
        return "it has no parameters", "name a module that has"
    if claim.path in _tied(captured):
        return "its weight is tied to another one, which would not train with it", _KEEP
    if not claim.node and claim.target.settings["masters"] == "fp32" and _dtype(module) != "torch.float32":
        return "a stock module trains in its own dtype", "leave `masters` out"
    inner = [other for other in claims if other is not claim and other.path.startswith(f"{claim.path}.")]
    if not claim.node and (inside := next((o for o in inner if o.facet in ("adapter", "kernel", "quant")), None)):
        return f"rule `{inside.rule}` rewrites `{inside.path}` inside of it", "name the modules one by one"
    if kernel := next((o.target for o in claims if o.target.fixed_weights and _same(claim, o)), None):
        return f"`{kernel.name}` multiplies a weight that does not change", "leave the kernel out"
    experts = _kernel(claim, claims) if claim.node else None
    if experts is not None and not _has_stock_layout(captured, claim, module):
        return "the model keeps these experts in a layout of its own, which no file of trained weights has", _KEEP
    stored = experts.settings.get("format", "stored") if experts is not None else "stored"
    if experts is not None and stored not in ("stored", "bf16") and not _rounded(claim, claims):
        return f"`{experts.name}(format = {stored})` would round its masters", "write `fake_quant` to round them"
    return _elsewhere(claim, claims) if claim.node else None


def _elsewhere(claim: Claim, claims: Sequence[Claim]) -> _Why:
    """Return why weights that change cannot be where a rule puts them."""
    for other in claims:
        place = other.target.placement
        if place is not None and other.path == claim.path and (place.prefill or place.stream):
            return "its weights are sent to a GPU and do not change there", "leave `prefill` and `stream` out"
    return None


# What is said --------------------------------------------------------------------------------------------------------
def _reasons(
    rounding: Sequence[Claim], training: Sequence[Claim], treatments: Mapping[str, NodeWeights]
) -> Iterator[Reason]:
    """Yield a sentence for each rule and treatment; the modules of one parent are written as a choice."""
    groups: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for claim in {claim.path: claim for claim in (*rounding, *training)}.values():
        weights = treatments.get(claim.path)
        text = "trains in its own dtype, as PEFT's `modules_to_save`" if weights is None else _described(weights)
        parent, _, leaf = claim.path.rpartition(".")
        kind = ".".join("*" if part.isdigit() else part for part in parent.split("."))
        leaves = groups.setdefault((text, f"rule `{claim.rule}` ({claim.span})", kind), {})
        leaves.setdefault(parent, []).append(leaf)
    for (text, rule, _), leaves in groups.items():
        names = list(dict.fromkeys(leaf for of_parent in leaves.values() for leaf in of_parent))
        last = names[0] if len(names) == 1 else "{" + ",".join(names) + "}"
        yield Reason(f"{collapse(list(leaves))}.{last}".lstrip("."), f"{text}: {rule}")


def _described(weights: NodeWeights) -> str:
    grid = ""
    if weights.grid:
        name, group, mode = weights.grid.split()
        grid = f"{name} with a scale per {'row' if group == '-1' else f'{group} weights'}"
        grid += "" if mode == "scale_first" else f" ({mode})"
    if weights.merged:
        return f"the frozen weights and their adapter are rounded together to {grid}, after each optimizer step"
    if weights.masters:
        rounded = f", and rounded to {grid} after each optimizer step" if grid else ""
        return f"trains with masters in {weights.masters}{rounded}"
    return f"the frozen weights are rounded to {grid} once, when they are loaded"


# Where they are ------------------------------------------------------------------------------------------------------
def _same(one: Claim, other: Claim) -> bool:
    return (one.site, one.node, one.path) == (other.site, other.node, other.path)


def _kernel(claim: Claim, claims: Sequence[Claim]) -> Target | None:
    return next((other.target for other in claims if other.target.takes_experts and _same(claim, other)), None)


def _adapter(claim: Claim, claims: Sequence[Claim]) -> Claim | None:
    adapters = (other for other in claims if other.target.adapts or other.target.trains_weights)
    return next((other for other in adapters if _same(claim, other)), None)


def _has_stock_layout(captured: CapturedModel, claim: Claim, module: nn.Module) -> bool:
    """Return whether the module's parameters are the stock tensors of its form, as `FusedMoe` has them."""
    about = ops.attributes(nodes_by_name(_graph(captured, claim))[claim.node])
    form, sizes = parse_form(str(about["form"])), (int(about["num_experts"]), int(about["hidden"]), int(about["inter"]))
    wanted = {str(name): stock_shape(form, name, *sizes) for name in stock_names(form)}
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    return shapes == wanted and not captured.block(claim.block).own_experts


def _rounded(claim: Claim, claims: Sequence[Claim]) -> bool:
    return any(other.target.rounding is not None and _same(claim, other) for other in claims)


def _operator(captured: CapturedModel, claim: Claim) -> str:
    return ops.operator(nodes_by_name(_graph(captured, claim))[claim.node])


def _graph(captured: CapturedModel, claim: Claim) -> fx.GraphModule:
    graph = captured.block(claim.block).graph
    assert graph is not None, "a claimed node is in a captured block"
    return graph


def _module(captured: CapturedModel, path: str) -> nn.Module | None:
    try:
        return captured.model.get_submodule(path)
    except AttributeError:
        return None


def _is_linear(captured: CapturedModel, path: str) -> bool:
    module = _module(captured, path)
    return module is not None and is_plain_linear(module)


def _dtype(module: nn.Module) -> str:
    return str(next(module.parameters()).dtype)


def _tied(captured: CapturedModel) -> set[str]:
    """Return the modules that share a parameter with another one."""
    owners: dict[int, list[str]] = {}
    modules = cast("Iterator[tuple[str, nn.Module]]", captured.model.named_modules(remove_duplicate=False))
    for name, module in modules:
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    return {name for names in owners.values() if len(names) > 1 for name in names}

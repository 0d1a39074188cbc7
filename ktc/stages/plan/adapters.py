"""The LoRA plan: exact target modules and PEFT's settings, from the adapters' claims and the `lora` block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.language.dsl.ruleset import RuleSet
from ktc.model.checkpoint.adapter_uses import AdapterFacts, refused_later, stored_as
from ktc.model.hf.conversions import adapted_one_by_one
from ktc.model.hf.tied_weights import tied_names
from ktc.model.targets.node_plan import Claim
from ktc.stages.capture import CapturedModel
from ktc.stages.plan.bypassed_layers import bypassed
from ktc.stages.plan.draft import PlanDraft
from ktc.stages.plan.expert_adapters import adapted_weights
from ktc.stages.plan.types import LoraPlan

DEFAULT_DROPOUT = 0.0
DEFAULT_RANK = 8  # PEFT's own, of a config that adapts nothing


def plan_lora(draft: PlanDraft) -> PlanDraft:
    """Decide the adapter of the program, if it has one. Raise InputRefused for targets that cannot be adapted."""
    captured, rules, modules = draft.captured, draft.rules, draft.trained_modules
    whole = sum(p.numel() for fqn in modules for p in captured.model.get_submodule(fqn).parameters())
    linears = {claim.path: claim for claim in draft.claims if claim.target.adapts == "linear"}
    adapting = [claim for claim in draft.claims if claim.target.adapts]
    if not adapting and not modules:
        return draft
    if not adapting:
        lora = LoraPlan((), (), DEFAULT_RANK, DEFAULT_RANK, DEFAULT_DROPOUT, {}, {}, whole, modules)
        return replace(draft, lora=lora)
    dropout = dropout_of(adapting, rules)
    experts = {weight.fqn: weight for weight in adapted_weights(captured, draft.claims)}
    sizes = _linear_sizes(captured, linears)
    first = next((claim for claim in linears.values()), adapting[0])
    r, alpha = int(_setting(first, rules, "rank")), float(_setting(first, rules, "alpha"))
    by_path = {**linears, **{fqn: weight.claim for fqn, weight in experts.items()}}
    ranks = {path: int(_setting(claim, rules, "rank")) for path, claim in by_path.items()}
    alphas = {path: float(_setting(claim, rules, "alpha")) for path, claim in by_path.items()}
    lora = LoraPlan(
        targets=tuple(linears),
        parameters=tuple(experts),
        r=r,
        lora_alpha=alpha,
        lora_dropout=dropout,
        rank_pattern={path: value for path, value in ranks.items() if value != r},
        alpha_pattern={path: value for path, value in alphas.items() if value != alpha},
        trainable=whole
        + sum(ranks[path] * sum(shape) for path, shape in sizes.items())
        + sum(weight.num_experts * ranks[path] * sum(weight.sizes) for path, weight in experts.items()),
        modules=modules,
    )
    return replace(draft, lora=lora)


def _linear_sizes(captured: CapturedModel, linears: Mapping[str, Claim]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that take LoRA. Raise InputRefused (M065) for others than linear layers."""
    modules = {module.fqn: module for module in captured.modules}
    classes = {path: modules[path].class_name if path in modules else "no module" for path in linears}
    wrong = [claim for path, claim in linears.items() if classes[path] != "Linear"]
    if wrong:
        by_action = {claim.span: claim for claim in reversed(wrong)}  # one diagnostic each, for the first of its layers
        raise InputRefused(*(_no_linear(claim, classes[claim.path]) for claim in by_action.values()))
    return {path: next(tensor.shape for tensor in modules[path].tensors if tensor.name == "weight") for path in linears}


def warn_of_adapters(draft: PlanDraft) -> PlanDraft:
    """Warn of rules that adapt nothing (M094), commands that will refuse the adapter (A613), and layers (M097)."""
    lora, captured = draft.lora, draft.captured
    if lora is None:
        return draft.with_warnings(*_without_adapter(draft.rules))
    source = captured.source
    facts = AdapterFacts(
        str(source.config.model_type),
        (*lora.targets, *lora.parameters),
        lora.modules,
        tied_names(captured.model),
        stored_as(source.index, source.config, source.config.get_text_config()),
        source.own_code,
        not source.own_code and not adapted_one_by_one(captured.model),
        int(getattr(source.config.get_text_config(), "num_hidden_layers", 0)),
        bool(lora.lora_dropout),
    )
    return draft.with_warnings(*refused_later(facts), *bypassed(captured, lora.targets))


def _without_adapter(rules: RuleSet) -> tuple[Diagnostic, ...]:
    adapting = [action for rule in rules.rules for action in rule.actions if action.facet == "adapter"]
    if not adapting:
        return ()
    message = "no layer of this model gets an adapter, so nothing trains: the rules that adapt layers match nothing"
    hint = "`ktc check` shows what each rule nearly matched; `ktc train --targets` names layers to adapt"
    return (Diagnostic("M094", message, adapting[0].span, hint=hint, severity="warning"),)


def _setting(claim: Claim, rules: RuleSet, name: str) -> float:
    """Return the rule's own value or that of the `lora` block; alpha defaults to the rank, as in PEFT's r = alpha."""
    value = claim.target.settings.get(name)
    if value is None:
        value = rules.lora.get(name)
    if value is None and name == "alpha":
        return _setting(claim, rules, "rank")
    assert isinstance(value, int | float), "the checker demands a rank for every adapter"
    return float(value)


def dropout_of(claims: Sequence[Claim], rules: RuleSet) -> float:
    """Return the one dropout of the whole adapter: PEFT's LoraConfig has a single value."""
    values = {float(v) for c in claims if isinstance(v := c.target.settings.get("dropout"), int | float)}
    default = rules.lora.get("dropout")
    values = values or {float(default) if isinstance(default, int | float) else DEFAULT_DROPOUT}
    if len(values) > 1:
        message = f"adapters have several dropouts ({', '.join(map(str, sorted(values)))})"
        hint = "an adapter has one dropout; set it in the `lora` block"
        raise InputRefused(Diagnostic("M072", message, claims[0].span, hint=hint))
    return values.pop()


def _no_linear(claim: Claim, class_name: str) -> Diagnostic:
    return Diagnostic(
        "M065",
        f"`{claim.target.name}` on `{claim.path}`, which is `{class_name}` and no linear layer that an adapter can "
        "wrap",
        claim.span,
        hint="name the projections with `on`",
    )

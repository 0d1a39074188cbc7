"""The LoRA plan: exact target modules and PEFT's settings, from the adapters' claims and the `lora` block."""

from __future__ import annotations

from collections.abc import Sequence

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.language.dsl.ruleset import RuleSet
from ktc.model.targets import LoraExperts, LoraLinear
from ktc.stages.capture import CapturedModel
from ktc.stages.plan.expert_adapters import adapted_weights
from ktc.stages.plan.trained import NOTHING_TRAINED, TrainedWeights
from ktc.stages.plan.types import Claim, LoraPlan

DEFAULT_DROPOUT = 0.0
DEFAULT_RANK = 8  # PEFT's own, of a config that adapts nothing


def plan_lora(
    captured: CapturedModel, claims: Sequence[Claim], rules: RuleSet, trained: TrainedWeights = NOTHING_TRAINED
) -> LoraPlan | None:
    """Return the adapter of the program, or None. Raise InputRefused for targets that cannot be adapted."""
    chosen = [claim for claim in claims if isinstance(claim.target, LoraLinear)]
    adapting = [claim for claim in claims if isinstance(claim.target, LoraLinear | LoraExperts)]
    whole = sum(p.numel() for fqn in trained.modules for p in captured.model.get_submodule(fqn).parameters())
    if not adapting and trained.modules:
        return LoraPlan((), (), DEFAULT_RANK, DEFAULT_RANK, DEFAULT_DROPOUT, {}, {}, whole, trained.modules)
    if not adapting:
        return None
    dropout = _dropout(adapting, rules)
    experts = adapted_weights(captured, claims, dropout)
    modules = {m.fqn: m for m in captured.modules}
    wrong = [c for c in chosen if c.path not in modules or modules[c.path].class_name != "Linear"]
    if wrong:
        by_place = {c.span: c for c in reversed(wrong)}  # one diagnostic per action, for the first of its layers
        classes = {c.path: modules[c.path].class_name if c.path in modules else "no module" for c in wrong}
        raise InputRefused(*(_no_linear(claim, classes[claim.path]) for claim in by_place.values()))
    first = (chosen or adapting)[0]
    r, alpha = int(_setting(first, rules, "rank")), float(_setting(first, rules, "alpha"))
    by_path = {**{c.path: c for c in chosen}, **{weight.fqn: weight.claim for weight in experts}}
    ranks = {path: int(_setting(c, rules, "rank")) for path, c in by_path.items()}
    alphas = {path: float(_setting(c, rules, "alpha")) for path, c in by_path.items()}
    trainable = sum(weight.num_experts * ranks[weight.fqn] * sum(weight.sizes) for weight in experts)
    for claim in chosen:
        weight = next(t for t in modules[claim.path].tensors if t.name == "weight")
        trainable += ranks[claim.path] * (weight.shape[0] + weight.shape[1])
    return LoraPlan(
        targets=tuple(dict.fromkeys(c.path for c in chosen)),
        parameters=tuple(dict.fromkeys(weight.fqn for weight in experts)),
        r=r,
        lora_alpha=alpha,
        lora_dropout=dropout,
        rank_pattern={path: value for path, value in ranks.items() if value != r},
        alpha_pattern={path: value for path, value in alphas.items() if value != alpha},
        trainable=trainable + whole,
        modules=trained.modules,
    )


def without_adapter(rules: RuleSet, lora: LoraPlan | None) -> tuple[Diagnostic, ...]:
    """Return a finding (M094) for a program whose rules adapt layers, none of which this model has."""
    adapting = [action for rule in rules.rules for action in rule.actions if action.facet == "adapter"]
    if lora is not None or not adapting:
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


def _dropout(claims: Sequence[Claim], rules: RuleSet) -> float:
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
        f"`{LoraLinear.name}` on `{claim.path}`, which is `{class_name}` and no linear layer that an adapter can wrap",
        claim.span,
        hint="name the projections with `on`",
    )

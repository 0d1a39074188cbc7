"""What a program asks for and this version does not build: planned and told by `check`, refused by `compile`.

Nothing that a program says is ignored. Where a later version builds one of these, its line here goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ktc.diagnostics import Diagnostic, HostLacks, InputRefused
from ktc.dsl import syntax
from ktc.dsl.ruleset import RuleSet
from ktc.dsl.schema import TARGETS
from ktc.plan.kernel_spec import KernelSpec
from ktc.plan.kernels import ON_EVERY_ISA
from ktc.plan.linear_spec import BUILT
from ktc.plan.prefill import asks_for_experts
from ktc.plan.types import Claim, Plan, PlannedOnly

# Settings that no stage carries out yet, with the values that ask for nothing.
_SETTINGS: dict[tuple[str, str], tuple[object, ...]] = {
    ("place", "prefill"): (None,),
    ("lora_linear", "dtype"): (None,),
    ("kt_linear", "kernel"): BUILT,
    ("kt_linear", "prefill"): (None, "torch"),
    ("cpu_moe", "numa"): (None, "none", "shard"),  # no copies of the weights for each node
}
_PLAN_KEYS: dict[str, tuple[object, ...]] = {
    "auto": ("none",),
    "grads": (),
    "cuda_graph": ("never",),
    "weights": ("safetensors",),
    "recompute": ("none",),
}


def not_built(
    claims: Sequence[Claim], kernels: Sequence[tuple[Claim, KernelSpec]], rules: RuleSet
) -> tuple[Diagnostic, ...]:
    """One warning per place of the program that asks for what this version does not build (M066)."""
    found = [
        *_targets(claims),
        *_settings(claims),
        *_kernels(kernels),
        *_plan_keys(rules, any(asks_for_experts(c, claims) for c in claims)),
    ]
    return tuple({(d.span, d.message): d for d in found}.values())


def require_feasible(plan: Plan) -> None:
    """Raise InputRefused for a plan with something that is not built, HostLacks for one over a memory budget."""
    if plan.unavailable:
        raise InputRefused(*(replace(problem, severity="error") for problem in plan.unavailable))
    if plan.over_budget:
        raise HostLacks(*plan.over_budget)


def planned_only(claims: Sequence[Claim]) -> tuple[PlannedOnly, ...]:
    """The targets that are not built, by rule, with the modules they stand on."""
    paths: dict[tuple[str, str], list[str]] = {}
    for claim in claims:
        if not TARGETS[claim.target].available:
            held = paths.setdefault((claim.rule, claim.target), [])
            held += [path for path in (claim.site or claim.path,) if path not in held]
    spans = {(claim.rule, claim.target): claim.span for claim in claims}
    return tuple(PlannedOnly(*key, tuple(held), spans[key]) for key, held in paths.items())


def _targets(claims: Sequence[Claim]) -> Iterator[Diagnostic]:
    available = ", ".join(f"`{name}`" for name, target in TARGETS.items() if target.available)
    for claim in claims:
        if not TARGETS[claim.target].available:
            yield _missing(f"`{claim.target}`", claim, f"available: {available}")


def _settings(claims: Sequence[Claim]) -> Iterator[Diagnostic]:
    for claim in claims:
        for name, value in claim.settings.items():
            idle = _SETTINGS.get((claim.target, name))
            if idle is not None and value not in idle and not asks_for_experts(claim, claims):
                built = [word for word in idle if word is not None]
                hint = f"write `{name} = {built[0]}`" if name == "kernel" else f"leave `{name}` out"
                yield _missing(f"`{claim.target}({name} = {value})`", claim, hint)


def _kernels(kernels: Sequence[tuple[Claim, KernelSpec]]) -> Iterator[Diagnostic]:
    for claim, spec in kernels:
        for weight_format in spec.formats:
            if weight_format not in ON_EVERY_ISA:
                stored = " (the checkpoint's own)" if claim.settings["format"] == "stored" else ""
                usual = ON_EVERY_ISA[0]
                hint = f"write `format = {usual}`, or `--set format={usual}` if the program has that parameter"
                yield _missing(f"a kernel for `{weight_format}` weights{stored}", claim, hint)


def _plan_keys(rules: RuleSet, prefills: bool) -> Iterator[Diagnostic]:
    for unit in rules.units:
        for block in unit.module.declarations:
            if not isinstance(block, syntax.Block) or block.kind != "plan":
                continue
            for setting in block.settings:
                key, value = setting.key.text, rules.plan.get(setting.key.text)
                if key == "layerwise_prefill" and not prefills:
                    message = "`plan { layerwise_prefill }` has no effect: no experts have `place(cpu, prefill = ...)`"
                    yield Diagnostic("M066", message, setting.span, hint=f"leave `{key}` out", severity="warning")
                if key in _PLAN_KEYS and value not in _PLAN_KEYS[key]:
                    message = f"`plan {{ {key} = {value} }}` is not available in this version"
                    yield Diagnostic("M066", message, setting.span, hint=f"leave `{key}` out", severity="warning")


def _missing(what: str, claim: Claim, hint: str) -> Diagnostic:
    return Diagnostic("M066", f"{what} is not available in this version", claim.span, hint=hint, severity="warning")

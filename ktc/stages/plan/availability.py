"""Requests of a program that this version does not build: planned and reported by `check`, refused by `compile`.

No part of a program is ignored. A later version that builds one of these removes its line here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ktc.diagnostics import Diagnostic, HostLacks, InputRefused
from ktc.language.dsl import syntax
from ktc.language.dsl.ruleset import RuleSet
from ktc.language.dsl.schema import SETTINGS
from ktc.model.kernels.kernel_spec import KernelSpec
from ktc.model.kernels.spec import Spec
from ktc.model.targets import TARGETS, Place
from ktc.stages.plan.kernels import ON_EVERY_ISA
from ktc.stages.plan.prefill import asks_for_experts
from ktc.stages.plan.types import Claim, Plan, PlannedOnly

# Keys of the `plan` block that no stage carries out yet, with the values that have no effect.
_PLAN_KEYS: dict[str, tuple[object, ...]] = {
    "auto": ("none",),
    "grads": (),
    "cuda_graph": ("never", "decode"),
    "native_step": ("never", "decode"),
    "weights": ("safetensors",),
    "recompute": ("none",),
}


def not_built(claims: Sequence[Claim], chosen: Mapping[Claim, Spec], rules: RuleSet) -> tuple[Diagnostic, ...]:
    """Return one warning per location of the program that this version does not build (M066)."""
    found = [
        *_targets(claims),
        *_settings(claims),
        *_kernels(chosen),
        *_plan_keys(rules, _idle_keys(claims)),
    ]
    return tuple({(d.span, d.message): d for d in found}.values())


def require_feasible(plan: Plan) -> None:
    """Raise InputRefused for a plan with something that is not built, HostLacks for one over a memory budget."""
    if plan.unavailable:
        raise InputRefused(*(replace(problem, severity="error") for problem in plan.unavailable))
    if plan.over_budget:
        raise HostLacks(*plan.over_budget)


def planned_only(claims: Sequence[Claim]) -> tuple[PlannedOnly, ...]:
    """Return the targets that are not built, by rule, with their modules."""
    paths: dict[tuple[str, str], list[str]] = {}
    for claim in claims:
        if not claim.target.available:
            held = paths.setdefault((claim.rule, claim.target.name), [])
            held += [path for path in (claim.site or claim.path,) if path not in held]
    spans = {(claim.rule, claim.target.name): claim.span for claim in claims}
    return tuple(PlannedOnly(*key, tuple(held), spans[key]) for key, held in paths.items())


def _targets(claims: Sequence[Claim]) -> Iterator[Diagnostic]:
    available = ", ".join(f"`{name}`" for name, target in TARGETS.items() if target.available)
    for claim in claims:
        if not claim.target.available:
            yield _missing(f"`{claim.target.name}`", claim, f"available: {available}")


def _settings(claims: Sequence[Claim]) -> Iterator[Diagnostic]:
    for claim in claims:
        for name, value in claim.target.settings.items():
            built = claim.target.built.get(name)
            if built is not None and value not in built and not asks_for_experts(claim, claims):
                required = SETTINGS[claim.target.name][name].required
                hint = f"write `{name} = {built[0]}`" if required else f"leave `{name}` out"
                yield _missing(f"`{claim.target.name}({name} = {value})`", claim, hint)


def _kernels(chosen: Mapping[Claim, Spec]) -> Iterator[Diagnostic]:
    for claim, spec in chosen.items():
        if not isinstance(spec, KernelSpec):
            continue
        for weight_format in spec.formats:
            if weight_format not in ON_EVERY_ISA:
                stored = " (the checkpoint's own)" if claim.target.settings["format"] == "stored" else ""
                usual = ON_EVERY_ISA[0]
                hint = f"write `format = {usual}`, or `--set format={usual}` if the program has that parameter"
                yield _missing(f"a kernel for `{weight_format}` weights{stored}", claim, hint)


def _idle_keys(claims: Sequence[Claim]) -> Mapping[str, str]:
    """Return the keys of the `plan` block that have no effect on these claims, with the reason."""
    prefills = any(asks_for_experts(c, claims) and isinstance(c.target, Place) and c.target.prefill for c in claims)
    streams = any(isinstance(claim.target, Place) and claim.target.stream for claim in claims)
    reasons = {
        "layerwise_prefill": "" if prefills else "no experts have `place(cpu, prefill = ...)`",
        "stream_buffer": "" if prefills or streams else "no weights are sent to a GPU",
    }
    return {key: why for key, why in reasons.items() if why}


def _plan_keys(rules: RuleSet, idle: Mapping[str, str]) -> Iterator[Diagnostic]:
    for setting in plan_settings(rules):
        key, value = setting.key.text, rules.plan.get(setting.key.text)
        if key in idle:
            message = f"`plan {{ {key} }}` has no effect: {idle[key]}"
            yield Diagnostic("M066", message, setting.span, hint=f"leave `{key}` out", severity="warning")
        if key in _PLAN_KEYS and value not in _PLAN_KEYS[key]:
            message = f"`plan {{ {key} = {value} }}` is not available in this version"
            yield Diagnostic("M066", message, setting.span, hint=f"leave `{key}` out", severity="warning")


def plan_settings(rules: RuleSet) -> Iterator[syntax.Setting]:
    """Yield the settings of the `plan` block."""
    for unit in rules.units:
        for block in unit.module.declarations:
            if isinstance(block, syntax.Block) and block.kind == "plan":
                yield from block.settings


def _missing(what: str, claim: Claim, hint: str) -> Diagnostic:
    return Diagnostic("M066", f"{what} is not available in this version", claim.span, hint=hint, severity="warning")

"""Compare the emitted program with the replay, module by module: rewrite with settings, device, prefill device.

The program is printed, loaded and matched like any other. Its effect is read from its matches, never from the emitter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ktc.diagnostics import Diagnostic, ProofFailed
from ktc.foundation.module_paths import from_inside
from ktc.language.dsl import syntax
from ktc.language.dsl.ruleset import RuleAction, RuleSet
from ktc.language.dsl.schema import SETTINGS
from ktc.stages.capture import CapturedModel
from ktc.stages.match import Matches
from ktc.stages.plan.claims import resolve_claims
from ktc.tools.kt_yaml.effects import Kernel, Outcome
from ktc.tools.kt_yaml.reach import run_program

MAX_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of the program: rewrites by path, and the placements that modules inherit."""

    kernels: Mapping[str, tuple[RuleAction, ...]]
    places: Mapping[str, tuple[str, str]]  # path -> device, prefill device; "" is the whole model

    def place_of(self, path: str) -> tuple[str, str]:
        return next(self.places[around] for around in from_inside(path) if around in self.places)


@dataclass(frozen=True, slots=True)
class Verified:
    """The number of modules that were compared, and of those with a rewrite."""

    modules: int
    rewrites: int
    effect: Effect


def verify(module: syntax.Module, outcomes: Sequence[Outcome], captured: CapturedModel) -> Verified:
    """Compare the program's effect with the outcomes of the replay.

    Raises:
        ProofFailed: K030, with the modules that the program treats differently from the file.
    """
    ruleset, matches = run_program(module, captured)
    resolve_claims(captured, matches, ruleset)
    effect = _effect(ruleset, matches)
    differences = [f"`{o.path}`: {said}" for o in outcomes for said in _differences(o, effect)]
    if differences:
        shown = "; ".join(differences[:MAX_SHOWN]) + ("; ..." if len(differences) > MAX_SHOWN else "")
        message = f"the imported program does not do what the file does, {len(differences)} differences: {shown}"
        raise ProofFailed(Diagnostic("K030", message, hint="this is a bug in ktc: please report it with the file"))
    return Verified(len(outcomes), sum(outcome.kernel is not None for outcome in outcomes), effect)


def _effect(ruleset: RuleSet, matches: Matches) -> Effect:
    unplaced = str(ruleset.plan.get("unplaced") or "cpu")
    kernels, places = dict[str, tuple[RuleAction, ...]](), {"": (unplaced, unplaced)}
    for rule in ruleset.rules:
        for match in matches.of(rule.name):
            for action in rule.actions:
                if action.facet == "kernel":
                    kernels[match.path] = (*kernels.get(match.path, ()), action)
                elif place := action.target.placement:
                    places[match.path] = (place.device, place.prefill or place.device)
    return Effect(kernels, places)


def _differences(outcome: Outcome, effect: Effect) -> list[str]:
    said: list[str] = []
    actions = effect.kernels.get(outcome.path, ())
    if not _same_kernel(outcome.kernel, actions):
        wanted = outcome.kernel.target if outcome.kernel else "no rewrite"
        said.append(f"{wanted} expected, found {', '.join(action.target.name for action in actions) or 'none'}")
    if not outcome.located:
        return said
    device, prefill = effect.place_of(outcome.path)
    if outcome.pinned:  # its rewrite decides the device, and without a separate placement also the prefill device
        device, prefill = "cpu", prefill if outcome.path in effect.places else "cpu"
    if device != outcome.device:
        said.append(f"{outcome.device} expected, found {device}")
    if prefill != outcome.prefill:
        said.append(f"prefill on {outcome.prefill} expected, found {prefill}")
    return said


def _same_kernel(wanted: Kernel | None, actions: Sequence[RuleAction]) -> bool:
    if wanted is None or len(actions) != 1:
        return wanted is None and not actions
    (action,) = actions
    defaults = {name: spec.default for name, spec in SETTINGS[wanted.target].items()}
    return action.target.name == wanted.target and action.target.settings == {**defaults, **dict(wanted.settings)}

"""The settings of the `plan` block that have no effect on a model."""

from __future__ import annotations

from collections.abc import Iterator

from ktc.diagnostics import Diagnostic, Span
from ktc.language.dsl import syntax
from ktc.language.dsl.ruleset import RuleSet
from ktc.stages.plan.draft import PlanDraft


def check_settings(draft: PlanDraft) -> PlanDraft:
    """Warn of settings without an effect (M066)."""
    return draft.with_warnings(*_without_effect(draft))


def _without_effect(draft: PlanDraft) -> Iterator[Diagnostic]:
    places = [place for claim in draft.claims if (place := claim.target.placement)]
    streams = any(place.stream for place in places)
    prefills = any(place.prefill for place in places)
    sent = [plan.prefill for plan in draft.nodes if plan.prefill is not None]  # chosen ones too
    idle = {
        "layerwise_prefill": "" if prefills else "no experts have `place(cpu, prefill = ...)`",
        "experts_split": "" if any(prefill.kept is not None for prefill in sent) else "no decoding step splits experts",
        "divided_prompts": "" if any(one.kept is not None for one in sent) else "no decoding step splits experts",
        "stream_buffer": ""
        if prefills or streams or not all(prefill.resident for prefill in sent)
        else "no weights are sent to a GPU",
    }
    for key, why in idle.items():
        if why and (span := span_of(draft.rules, key)) is not None:
            message = f"`plan {{ {key} }}` has no effect: {why}"
            yield Diagnostic("M066", message, span, hint=f"leave `{key}` out", severity="warning")


def span_of(rules: RuleSet, key: str) -> Span | None:
    """Return where the program gives a setting of the `plan` block."""
    blocks = (block for unit in rules.units for block in unit.module.declarations if isinstance(block, syntax.Block))
    settings = (setting for block in blocks if block.kind == "plan" for setting in block.settings)
    return next((setting.span for setting in settings if setting.key.text == key), None)

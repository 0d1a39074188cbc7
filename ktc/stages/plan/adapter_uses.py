"""The refusals that later commands will have for the adapter that a program trains."""

from __future__ import annotations

from ktc.diagnostics import Diagnostic
from ktc.model.checkpoint.adapter_uses import AdapterFacts, refused_later, stored_as
from ktc.model.hf.conversions import names_one_by_one
from ktc.model.hf.tied_weights import tied_names
from ktc.stages.capture import CapturedModel
from ktc.stages.plan.types import LoraPlan


def adapter_warnings(captured: CapturedModel, lora: LoraPlan | None) -> tuple[Diagnostic, ...]:
    """Return a finding (A613) for each command that will refuse the adapter."""
    if lora is None:
        return ()
    source = captured.source
    facts = AdapterFacts(
        str(source.config.model_type),
        (*lora.targets, *lora.parameters),
        lora.modules,
        tied_names(captured.model),
        stored_as(source.index, source.config, source.config.get_text_config()),
        source.own_code,
        not source.own_code and not names_one_by_one(captured.model),
        int(getattr(source.config.get_text_config(), "num_hidden_layers", 0)),
    )
    return refused_later(facts)

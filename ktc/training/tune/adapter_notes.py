"""The refusals that later commands will have for the adapter of a run, known before its first step.

In: the paths of the run and the model with its adapter. Out: findings (A613).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from peft import PeftModel

from ktc.diagnostics import Diagnostic
from ktc.foundation.decode import read_json
from ktc.foundation.regular_files import read_regular
from ktc.model.checkpoint.adapter_uses import AdapterFacts, refused_later, stored_as
from ktc.model.checkpoint.index import open_index
from ktc.model.hf.conversions import adapted_one_by_one
from ktc.model.hf.tied_weights import tied_names
from ktc.model.manifest.manifest import read_manifest
from ktc.training.tune.types import RunPaths


def adapter_notes(paths: RunPaths, model: PeftModel) -> tuple[Diagnostic, ...]:
    """Return a finding for each command that will refuse the adapter, by the layers that PEFT has chosen."""
    base, tuner = cast("Any", model.get_base_model()), cast("Any", model.base_model)
    record = read_manifest(paths.out).model
    folder = paths.weights or Path(record.folder)
    config = cast("Mapping[str, Any]", read_json(read_regular(folder / "config.json")))
    parts = [cast("Mapping[str, Any]", part) for part in config.values() if isinstance(part, Mapping)]
    chosen: Any = next(iter(model.peft_config.values()))
    facts = AdapterFacts(
        str(base.config.model_type),
        (*tuner.targeted_module_names, *tuner.targeted_parameter_names),
        tuple(chosen.modules_to_save or ()),
        tied_names(base),
        stored_as(open_index(folder), config, *parts),
        record.own_code,
        not record.own_code and not adapted_one_by_one(base),
        int(getattr(base.config.get_text_config(), "num_hidden_layers", 0)),
        bool(getattr(chosen, "lora_dropout", 0)),
    )
    return refused_later(facts)

"""The part for text of a model with towers, as a GGUF file has it: its tensors, and a config.json of its own.

In: the stock model on meta, or a checkpoint's config. Out: names of the tensors that a file of text has, and the config
of the causal LM that computes the same of text: the one that the language model's config is of, or the family that its
layers are of. Refused (A606): a part for text that no causal LM of transformers computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ktc.adapters.base_model import BaseModel
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.graph.typed import named_modules
from ktc.model.hf.stock_model import has_towers, text_tower

# Configs of text that no causal LM is of, the family that computes the same of text, and what it has to be told.
_SAME_AS: Final[Mapping[str, tuple[str, Mapping[str, object]]]] = {
    "qwen3_vl_moe_text": ("qwen3_moe", {"norm_topk_prob": True}),
}
NOTE: Final = "the towers for images are not in the file: llama.cpp takes them from an `mmproj` file of its own tools"


def text_type(base: BaseModel) -> str:
    """Return the model type of the part for text, or of a model of text."""
    return str(base.config.get_text_config().model_type) if has_towers(base.model) else base.model_type


def names_of_text(base: BaseModel) -> frozenset[str]:
    """Return the names of the model's tensors but those of towers."""
    names = base.model.state_dict().keys()
    if not has_towers(base.model):
        return frozenset(names)
    parts = text_tower(base.model), cast("Any", base.model.get_output_embeddings())
    kept = [f"{name}." for name, module in named_modules(base.model) if any(module is part for part in parts)]
    return frozenset(name for name in names if name.startswith(tuple(kept)))


def text_config(base: BaseModel) -> dict[str, Any] | None:
    """Return what config.json has beside a file of the part for text; `None` for a model of text. Raises (A606)."""
    if not has_towers(base.model):
        return None
    part = base.config.get_text_config()
    same: tuple[str, Mapping[str, object]] = (part.model_type, {})
    kind, settings = _SAME_AS.get(part.model_type, same)
    names = cast("Mapping[str, str]", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if kind not in names:
        message = f"the part for text of `{base.model_type}` is no causal LM of its own in transformers"
        raise InputRefused(Diagnostic("A606", message, hint="use the model with ktc or transformers"))
    config: dict[str, Any] = {**part.to_dict(), **settings, "model_type": kind, "architectures": [names[kind]]}
    rope = cast("dict[str, Any]", config.get("rope_parameters") or {})
    config["rope_parameters"] = {name: value for name, value in rope.items() if not name.startswith("mrope")}
    config["tie_word_embeddings"] = bool(getattr(base.model, "all_tied_weights_keys", None))
    config.pop("quantization_config", None)
    return config

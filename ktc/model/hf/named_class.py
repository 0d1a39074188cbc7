"""The kind of model that config.json names in `architectures`, for messages about models that ktc cannot compile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ktc.model.hf.stock_model import multimodal_class

_KINDS: Final[Mapping[str, str]] = {
    "ForSequenceClassification": "a sequence classifier",
    "ForTokenClassification": "a token classifier",
    "ForQuestionAnswering": "a model for question answering",
    "ForMultipleChoice": "a model for multiple choice",
    "ForMaskedLM": "a masked language model",
    "RewardModel": "a reward model",
    "Model": "a model without a language-model head",
}
_WITH_A_HEAD: Final = ("LMHeadModel", "HeadsModel")
_GENERATION: Final = "ForConditionalGeneration"


def not_a_causal_lm(config: PreTrainedConfig) -> str:
    """Return which other kind of model config.json names, as a sentence; empty if it names a causal LM or nothing."""
    named = cast("list[str]", getattr(config, "architectures", None) or [""])[0]
    own_classes = cast("Mapping[str, object]", getattr(config, "auto_map", None) or {})
    own_class = str(own_classes.get("AutoModelForCausalLM", "")).rpartition(".")[2]
    causal = {*cast("dict[str, Any]", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES).values(), own_class}
    if multimodal_class(config) is not None or named in causal or named.endswith(_WITH_A_HEAD):
        return ""
    kind = next((words for ending, words in _KINDS.items() if named.endswith(ending)), "")
    if named.endswith(_GENERATION):
        has_parts = config.get_text_config() is not config  # one for the text, besides those of other modalities
        kind = "an encoder-decoder model" if config.is_encoder_decoder else "a multimodal model" * has_parts
    return f"config.json names `{named}`, {kind}; ktc compiles causal LMs" if kind else ""

"""Settings of whole models that a family's defaults leave open or contradict, as its published checkpoints have them.

Input: a `model_type`. Output: the config of the whole model. Only relations between sizes matter here: a twin shrinks
the sizes themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from transformers import PretrainedConfig

from ktc.model.twin import default_config

_ROPE: Final = {"rope_type": "default", "rope_theta": 10_000.0}
# By model type and part of the config.
_SETTINGS: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "deepseek_ocr2": {
        "text_config": {
            "mlp_layer_types": ["dense", *["sparse"] * 31], "num_attention_heads": 32, "num_experts_per_tok": 6,
        },
        "vision_config": {"encoder_config": {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2}},
    },
    "ernie4_5_vl_moe": {"text_config": {"head_dim": 128, "rope_parameters": {**_ROPE, "mrope_section": [22, 22, 20]}}},
    "glm4v_moe": {
        "text_config": {
            "head_dim": 128,
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]},
        },
    },
    "llama4": {"vision_config": {"hidden_size": 1408, "vision_output_dim": 4096}},
    "qwen3_omni_moe_thinker": {
        "": {"vision_start_token_id": 151_652, "vision_end_token_id": 151_653},
        "text_config": {
            "num_attention_heads": 32, "head_dim": 128, "vocab_size": 152_064,
            "rope_parameters": {**_ROPE, "mrope_section": [24, 20, 20], "mrope_interleaved": True},
        },
        "vision_config": {"out_hidden_size": 2048},
        "audio_config": {"output_dim": 2048},
    },
    "step3p7": {"text_config": {"sliding_window": 512}},
}  # fmt: skip


def whole_config(family: str) -> PretrainedConfig:
    """Return the config of a whole model. Raises InputRefused (I103) as `default_config` does."""
    settings: dict[str, Any] = default_config(family, whole=True).to_dict()
    for part, named in _SETTINGS.get(family, {}).items():
        holder = cast("dict[str, Any]", settings[part]) if part else settings
        for name, value in named.items():
            inner = holder.get(name)
            nested = isinstance(inner, dict) and name.endswith("_config")
            holder[name] = {**cast("dict[str, Any]", inner), **value} if nested else value
    return type(default_config(family, whole=True)).from_dict(settings)

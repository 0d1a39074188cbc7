"""Configs within a config, in code of the model's own: under the name of transformers and under another."""

from __future__ import annotations

from typing import Any

from invented.family import Family

_AUTO_MAP = {
    "AutoConfig": "modeling_invented.WholeConfig",
    "AutoModelForCausalLM": "modeling_invented.InventedForCausalLM",
}
_OUTER: dict[str, Any] = {"model_type": "invented_whole", "auto_map": _AUTO_MAP}
_INNER: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": None, "dtype": "bfloat16"}

FAMILIES = (
    Family(
        "config_in_config",
        "config.scale",
        "2 * config.scale",
        settings=_OUTER | {"llm_config": _INNER | {"num_experts": 12}, "scale": 0.5},
    ),
    Family(
        "text_config_of_code",
        'get("scale", 1.0)',
        'get("factor", 1.0)',
        settings=_OUTER | {"text_config": _INNER | {"num_experts": 12}, "vision_config": {"scale": 0.5}},
    ),
)

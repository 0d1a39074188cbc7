"""Published sizes of models that GGUF files are written of, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Sizes:
    """The model type of transformers, the architecture of its GGUF files, and the values of its config.json."""

    model_type: str
    architecture: str
    config: Mapping[str, Any]


SIZES: Final[Mapping[str, Sizes]] = {
    "olmoe": Sizes(  # OLMoE-1B-7B
        "olmoe",
        "olmoe",
        {
            "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16,
            "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "vocab_size": 50304,
            "max_position_embeddings": 4096, "norm_topk_prob": False, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        },
    ),
    "qwen3_30b": Sizes(  # Qwen3-30B-A3B
        "qwen3_moe",
        "qwen3moe",
        {
            "hidden_size": 2048, "moe_intermediate_size": 768, "intermediate_size": 6144, "num_hidden_layers": 48,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
            "num_experts_per_tok": 8, "vocab_size": 151936, "max_position_embeddings": 40960, "norm_topk_prob": True,
            "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        },
    ),
    "gpt_oss_20b": Sizes(  # gpt-oss-20b
        "gpt_oss",
        "gpt-oss",
        {
            "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
            "vocab_size": 201088, "max_position_embeddings": 131072, "sliding_window": 128, "rms_norm_eps": 1e-5,
        },
    ),
    "tiny": Sizes(  # for tests: seconds, and no figure of any use
        "olmoe",
        "olmoe",
        {
            "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 512,
            "max_position_embeddings": 256, "norm_topk_prob": False, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        },
    ),
}  # fmt: skip

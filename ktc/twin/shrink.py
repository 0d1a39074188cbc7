"""A config shrunk to witness size: the same class and flags, small dimensions, every kind of layer.

In: any causal-LM config of transformers. Out: a copy; the original stays as it is. Refuses nothing: an attribute that
a config lacks, or that is None there, stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NUM_EXPERTS = 16
NUM_GROUPS = 4  # 4 * 2 < 16: a group holds more than the two experts whose scores some routers add
TOPK_GROUP = 2  # below top_k, so that the group limit changes which experts win
TOP_K = 4
NUM_HEADS = 4
VOCAB = 256

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_KS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
# The size each attribute shrinks to. An attribute that the config lacks, or that is None or 0 there, stays as it is.
_SIZES: Mapping[str, int] = {
    **dict.fromkeys(EXPERT_COUNTS, NUM_EXPERTS),
    **dict.fromkeys(TOP_KS, TOP_K),
    "hidden_size": 64,
    "intermediate_size": 80,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 56,
    "num_attention_heads": NUM_HEADS,
    "head_dim": 16,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_shared_experts": 2,
    "sliding_window": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 64,
    "vocab_size": VOCAB,
}
_KEEP_IF_SMALLER = (*TOP_KS, "n_shared_experts")
_DENSE_FIRST = ("first_k_dense_replace", "moe_layer_start_index")


def shrink(config: PretrainedConfig) -> PretrainedConfig:
    """A witness-sized copy of `config`: the same class and flags with small dimensions; `config` stays as it is.

    Flags that choose another computation keep their meaning: no group stays no group, no query compression stays none,
    equal head counts stay equal, and a model that begins with dense layers keeps one.
    """
    small = type(config).from_dict(config.to_dict())
    vars(small).pop("quantization_config", None)
    for name, size in _SIZES.items():
        old = getattr(small, name, None)
        if isinstance(old, int) and old > 0:
            setattr(small, name, min(old, size) if name in _KEEP_IF_SMALLER else size)
    _shrink_attention_heads(small, config)
    _shrink_groups(small)
    _shrink_layers(small, config)
    _shrink_token_ids(small)
    small.max_position_embeddings = max(512, getattr(small, "max_position_embeddings", 0) or 0)
    return small


def _shrink_attention_heads(config: PretrainedConfig, original: PretrainedConfig) -> None:
    kv_heads = getattr(original, "num_key_value_heads", None)
    if kv_heads is not None and kv_heads > 1:
        config.num_key_value_heads = NUM_HEADS if kv_heads == original.num_attention_heads else NUM_HEADS // 2
    rotary = getattr(config, "qk_rope_head_dim", None)
    if rotary is None:
        return
    if hasattr(original, "qk_head_dim"):
        config.qk_head_dim = config.qk_nope_head_dim + rotary
    if getattr(original, "head_dim", None) == original.qk_rope_head_dim:
        config.head_dim = rotary


def _shrink_groups(config: PretrainedConfig) -> None:
    groups, kept = getattr(config, "n_group", None), getattr(config, "topk_group", None)
    if groups is None or groups <= 1:
        return
    config.n_group = NUM_GROUPS
    config.topk_group = NUM_GROUPS if kept == groups else TOPK_GROUP


def _shrink_layers(config: PretrainedConfig, original: PretrainedConfig) -> None:
    """Two layers of experts, after one dense layer where there are any; every kind that a per-layer list names."""
    depth = int(original.num_hidden_layers)
    dense_first = [name for name in _DENSE_FIRST if (getattr(original, name, None) or 0) > 0]
    for name in dense_first:
        setattr(config, name, 1)
    dense_listed = bool(getattr(original, "mlp_only_layers", None))
    if dense_listed:
        config.mlp_only_layers = [0]
    layers = 2 + bool(dense_first or dense_listed)
    layers = max(layers, 2 * (getattr(original, "decoder_sparse_step", 1) or 1))
    if (getattr(original, "moe_layer_end_index", None) or 0) > 0:
        config.moe_layer_end_index = layers - 1
    settings: dict[str, object] = vars(original)
    per_layer = [
        name
        for name, value in settings.items()
        if isinstance(value, list) and len(cast("list[object]", value)) == depth > 2
    ]
    if per_layer:
        rows = list(zip(*(getattr(original, name) for name in per_layer), strict=True))
        picked = sorted({str(row): index for index, row in reversed(list(enumerate(rows)))}.values())
        picked += [depth - 1] * (layers - len(picked))
        for name in per_layer:
            setattr(config, name, [getattr(original, name)[index] for index in picked])
        layers = len(picked)
    config.num_hidden_layers = min(depth, layers)
    for name in ("num_nextn_predict_layers", "max_window_layers"):
        if getattr(config, name, None):
            setattr(config, name, 0 if name == "num_nextn_predict_layers" else config.num_hidden_layers)


def _shrink_token_ids(config: PretrainedConfig) -> None:
    for index, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")):
        value = getattr(config, name, None)
        if value is not None and (not isinstance(value, int) or value >= config.vocab_size):
            setattr(config, name, index)

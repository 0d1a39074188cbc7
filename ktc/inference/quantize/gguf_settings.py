"""The settings of a model's GGUF file, from config.json: sizes, attention, rotary embedding, experts.

In: the stock model's config. Out: settings in a writer of the `gguf` package. llama.cpp fixes some of them per
architecture; a config that differs there is another model in llama.cpp, and refused (Q510).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ktc.adapters.base_model import BaseModel
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.inference.quantize.gguf_text import text_type

# Whether llama.cpp normalises the weights of the chosen experts, where no setting of the file says it.
_SECTIONS: Final = (24, 20, 20)  # of Qwen3-VL where config.json does not say
_NORMALISES: Final[Mapping[str, bool]] = {"qwen3moe": True, "qwen2moe": False, "olmoe": False}


def add_settings(writer: Any, base: BaseModel, architecture: str) -> tuple[str, ...]:
    """Add the settings of the model, and return notes of what llama.cpp computes differently.

    Raises InputRefused (Q510).
    """
    config: Any = base.config.get_text_config()
    _require_same_model(config, architecture)
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    if architecture == "deepseek2":
        _latent_attention(writer, config, rope)
    else:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
    _rope_scaling(writer, rope)
    _experts(writer, base, config, architecture)
    if getattr(config, "clip_qkv", None):
        writer.add_clamp_kqv(config.clip_qkv)
    if architecture == "qwen3vlmoe":
        _positions(writer, base, rope)
    if architecture == "gpt-oss":
        writer.add_sliding_window(config.sliding_window)
    if rope.get("rope_type") == "yarn" and not rope.get("truncate", True):
        return ("llama.cpp rounds the range of frequencies that yarn blends, and this model does not: answers differ",)
    if text_type(base) == "deepseek_v2" and (config.n_group or 1) > 1 and config.topk_method != "greedy":
        return ("llama.cpp ranks groups of experts by their two best, and this model by the best: answers differ",)
    return ()


def _require_same_model(config: Any, architecture: str) -> None:
    normalises = _NORMALISES.get(architecture)
    wanted = bool(getattr(config, "norm_topk_prob", normalises))
    if normalises is not None and wanted != normalises:
        message = (
            f"config.json has `norm_topk_prob` = {wanted}, and llama.cpp computes `{architecture}` with {normalises}"
        )
        raise InputRefused(Diagnostic("Q510", message, hint="the model has no GGUF form; use it with ktc"))


def _latent_attention(writer: Any, config: Any, rope: Mapping[str, Any]) -> None:
    """Add sizes of attention as llama.cpp computes it, on the latents of the cache, with one head of keys."""
    writer.add_head_count_kv(1)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if rope.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * float(rope["mscale_all_dim"]))


def _positions(writer: Any, base: BaseModel, rope: Mapping[str, Any]) -> None:
    """Add how positions of several axes share a head's channels, and the layers that features of images enter."""
    sections = [int(count) for count in rope.get("mrope_section") or _SECTIONS]
    writer.add_rope_dimension_sections([*sections, *[0] * (4 - len(sections))])
    vision: Any = getattr(base.config, "vision_config", None)
    writer.add_num_deepstack_layers(len(getattr(vision, "deepstack_visual_indexes", None) or ()))


def _rope_scaling(writer: Any, rope: Mapping[str, Any]) -> None:
    kind = str(rope.get("rope_type", "default"))
    if kind == "default":
        return
    if kind not in ("linear", "yarn"):
        message = f"config.json has rotary embedding of type `{kind}`, for which ktc writes no GGUF settings"
        raise InputRefused(Diagnostic("Q510", message, hint="use the model with ktc or transformers"))
    from gguf import RopeScalingType

    writer.add_rope_scaling_type(RopeScalingType(kind))
    writer.add_rope_scaling_factor(float(rope["factor"]))
    original = rope.get("original_max_position_embeddings")
    if original:
        writer.add_rope_scaling_orig_ctx_len(int(original))


def _experts(writer: Any, base: BaseModel, config: Any, architecture: str) -> None:
    stacks = {name: target for name, target in base.targets.items() if target.experts}
    if not stacks:
        return
    count = next(iter(stacks.values())).experts
    writer.add_expert_count(count)
    writer.add_expert_used_count(config.num_experts_per_tok)
    size = getattr(config, "moe_intermediate_size", None) or (architecture == "gpt-oss" and config.intermediate_size)
    if size:
        writer.add_expert_feed_forward_length(size)
    shared = getattr(config, "shared_expert_intermediate_size", None)
    if shared:
        writer.add_expert_shared_feed_forward_length(shared)
    if architecture != "deepseek2":
        return
    from gguf import ExpertGatingFuncType

    layers = {int(part) for name in stacks for part in name.split(".") if part.isdigit()}
    writer.add_leading_dense_block_count(min(layers))
    writer.add_expert_shared_count(config.n_shared_experts or 0)
    writer.add_expert_weights_scale(float(config.routed_scaling_factor))
    is_sigmoid = text_type(base) == "deepseek_v3"
    writer.add_expert_weights_norm(bool(config.norm_topk_prob) if is_sigmoid else False)
    gating = ExpertGatingFuncType.SIGMOID if is_sigmoid else ExpertGatingFuncType.SOFTMAX
    writer.add_expert_gating_func(gating)
    if (config.n_group or 1) > 1:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)

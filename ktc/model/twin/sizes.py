"""The size of each dimension of a twin, by the attribute's name, and the relations between sizes.

Input: the settings of a config as plain values. Output: the small ones, changed in place. Head counts keep their
ratios, rotary dimensions their share of a head, state-space heads their product, groups of experts their number of
experts.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

Settings = Mapping[str, Any]

NUM_EXPERTS = 16
NUM_GROUPS = 4  # 4 * 2 < 16: a group holds more than the two experts whose scores some routers add
TOPK_GROUP = 2  # below top_k, so that the group limit changes which experts win
TOP_K = 4
HIDDEN = 64
NUM_HEADS = 4
HEAD_DIM = 16
ROTARY = 8
VOCAB = 256

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_KS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
_SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_HIDDEN = ("hidden_size", "d_model", "n_embd")
# Of towers: the width of what the language model gets, and the width of a tower that a projector names.
_TEXT_WIDTHS = ("out_hidden_size", "text_hidden_size", "projection_hidden_size", "output_dim", "adapter_out_dim")
_HEADS = ("num_attention_heads", "n_heads", "n_head", "encoder_attention_heads")
_KV_HEADS = ("num_key_value_heads", "kv_n_heads")
_GROUPS = {"n_group": "topk_group", "num_expert_group": "topk_group"}
_DENSE_WIDTHS = (
    "intermediate_size", "intermediate_size_mlp", "dense_intermediate_size", "prefix_dense_intermediate_size",
    "ffn_hidden_size", "ffn_dim", "n_inner", "encoder_ffn_dim",
)  # fmt: skip
_EXPERT_WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size")
_SHARED_WIDTHS = (
    "shared_expert_intermediate_size", "shared_experts_intermediate_size", "shared_intermediate_size",
    "moe_shared_expert_intermediate_size",
)  # fmt: skip
_WIDTH_WORDS = ("_dim", "_width", "channels", "adapter_input_size")  # of settings that repeat the width of a tower
_WINDOWS = ("sliding_window", "sliding_window_size", "rel_extent")
_CHUNKS = ("mamba_chunk_size", "chunk_size", "block_size")  # below the twin's sequences: several chunks in each
# The shrunk size of each attribute. An attribute that is missing, None or 0 is unchanged.
_SIZES: Mapping[str, int] = {
    **dict.fromkeys(EXPERT_COUNTS, NUM_EXPERTS),
    **dict.fromkeys(TOP_KS, TOP_K),
    **dict.fromkeys(_SHARED_COUNTS, 2),
    **dict.fromkeys((*_HIDDEN, *_TEXT_WIDTHS), HIDDEN),
    **dict.fromkeys(_HEADS, NUM_HEADS),
    **dict.fromkeys(_DENSE_WIDTHS, 80),
    **dict.fromkeys(_EXPERT_WIDTHS, 48),
    **dict.fromkeys(_SHARED_WIDTHS, 56),
    **dict.fromkeys(_WINDOWS, 32),
    **dict.fromkeys(_CHUNKS, 16),
    "head_dim": HEAD_DIM,
    "kv_channels": HEAD_DIM,
    "attention_chunk_size": 128,  # beyond the twin's sequences: the model's mask, not its attention, cuts the chunks
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "o_lora_rank": 24,
    "o_groups": 2,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": ROTARY,
    "v_head_dim": 16,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_d_state": 16,
    "ssm_state_size": 16,
    "mamba_dt_rank": 4,
    "mamba_n_groups": 2,
    "n_groups": 2,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 16,
    "index_block_size": 8,
    "index_topk_blocks": 2,
    "indexer_n_heads": 4,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "moe_latent_size": 32,
    "moe_hidden_size": 32,
    "projector_hidden_size": 80,
    "router_hidden_size": 32,
    "zero_expert_num": 8,
    "gated_norm_rank": 8,
    "hc_lowrank": 24,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB,
    "vocab_size": VOCAB,
    "unpadded_vocab_size": VOCAB - 6,
    "ngram_vocab_size_base": 512,
    "split_ngram_parts": 8,
    "ple_embed_dim": 64,
}
# The sizes of a second twin, which shares none of these with the first.
_OTHERS: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(EXPERT_COUNTS, (NUM_EXPERTS, 12)),
    **dict.fromkeys(TOP_KS, (TOP_K, 3)),
    **dict.fromkeys((*_HIDDEN, *_TEXT_WIDTHS), (HIDDEN, 96)),
    **dict.fromkeys(_DENSE_WIDTHS, (80, 104)),
    **dict.fromkeys(_EXPERT_WIDTHS, (48, 40)),
    **dict.fromkeys(_SHARED_WIDTHS, (56, 72)),
}
_STATE_SPACE = (
    ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
    ("mamba_num_heads", "mamba_head_dim", "expand"),
    ("num_heads", "head_dim", "expand"),
)
_HEAD_DIMS = (HEAD_DIM, 24, 32, 48, 64, 96, 128)
_AT_MOST = frozenset({*TOP_KS, *_SHARED_COUNTS, "mamba_n_groups", "n_groups", "o_groups"})
_NOT_PARTS = ("quantization_config", "per_layer_config", "generation_config")


def shrink_tower(small: dict[str, Any], old: Settings, parent: Settings) -> None:
    """Set the sizes of a tower for images or sound that others depend on, in place, after `shrink_sizes`.

    A tower without a vocabulary names its heads `num_heads`; its dense width keeps its ratio to the width; what is as
    wide as the tower, or as another of its parts, stays so. `old` holds the tower's original sizes, `parent` those of
    the config that it is a part of.
    """
    width = next((old[name] for name in _HIDDEN if is_size(old.get(name))), 0)
    if width and is_size(old.get("num_heads")) and not any(name in old for name in (*_HEADS, "expand")):
        small["num_heads"] = NUM_HEADS
    for name in _DENSE_WIDTHS:
        if width and is_size(old.get(name)) and old[name] % width == 0:
            small[name] = HIDDEN * old[name] // width
    if isinstance(old.get("hidden_sizes"), list):  # of stages, each wider than the last
        small["hidden_sizes"] = [max(16, width // 16) for width in cast("list[int]", small["hidden_sizes"])]
    parts = (old, *dict(parts_of(old)).values(), *dict(parts_of(parent)).values())
    widths = {part[name] for part in parts for name in _HIDDEN if is_size(part.get(name))}
    for name, value in old.items():
        if name not in _SIZES and any(word in name for word in _WIDTH_WORDS):
            small[name] = _as_wide(value, widths)


def widths_between(small: dict[str, Any], old: Settings) -> None:
    """Give what a config with towers says of their features its ratio to the width of a tower, in place.

    A projector may take several patches side by side: what it takes is as wide as these together.
    """
    towers = [part for name, part in parts_of(old) if name != "text_config"]
    widths = {part[name] for part in towers for name in _HIDDEN if is_size(part.get(name))}
    for name in _TEXT_WIDTHS:
        ratios = [old[name] // width for width in widths if is_size(old.get(name)) and old[name] % width == 0]
        if ratios:
            small[name] = HIDDEN * min(ratios)


def _as_wide(value: Any, widths: Container[int]) -> Any:
    """Return a width, or widths in a list, that is `HIDDEN` where it was one of `widths`."""
    if isinstance(value, list):
        return [_as_wide(size, widths) for size in cast("list[Any]", value)]
    return HIDDEN if is_size(value) and value in widths else value


def parts_of(settings: Settings) -> Iterator[tuple[str, Settings]]:
    """Yield the configs within a config: of its text model, its attention, its feed-forward blocks."""
    for name, value in settings.items():
        if name.endswith("_config") and isinstance(value, dict) and name not in _NOT_PARTS:
            yield name, cast("Settings", value)


def is_size(value: object) -> bool:
    """Return whether `value` is a dimension or a count: a positive integer."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def shrink_sizes(small: dict[str, Any], old: Settings) -> None:
    """Set every dimension in `small` to its size. `old` holds the original sizes, including the enclosing config's."""
    for name in list(small):
        if is_size(old.get(name)):
            small[name] = scaled(name, old[name], old)
    _shrink_rotary(small, old)
    _shrink_groups(small, old)
    _shrink_state_space_heads(small, old)
    rates = old.get("compress_rates")
    if isinstance(rates, dict):
        small["compress_rates"] = {kind: min(rate, 16) for kind, rate in cast("dict[str, int]", rates).items()}


def with_other_sizes(small: dict[str, Any]) -> None:
    """Give shrunk settings the sizes of a second twin, in place."""
    for name, (first, second) in _OTHERS.items():
        if is_size(small.get(name)) and small[name] == first:
            small[name] = second


def scaled(name: str, value: Any, old: Settings) -> Any:
    """Return the shrunk `value` of the setting `name`.

    A setting of some layers only (`swa_head_dim`, an entry of `per_layer_config`) keeps its ratio to the value for all
    layers. If the result is not an integer, it stays larger or smaller than that value.
    """
    stem = name.removeprefix("swa_").removesuffix("_per_layer")
    if not is_size(value):
        return value
    if stem in _KV_HEADS:
        size = _kv_heads(stem, old)
    elif stem in _SIZES:
        size = min(value, _SIZES[stem]) if stem in _AT_MOST else _SIZES[stem]
    else:
        return value
    reference = old.get(stem)
    if not is_size(reference) or value == reference:
        return size
    if stem in EXPERT_COUNTS:
        return max(min(value, TOP_K), value * size // reference)  # no fewer than a token needs
    if value * size % reference == 0:
        return value * size // reference
    return 2 * size if value > reference else max(1, size // 2)


def _kv_heads(name: str, old: Settings) -> int:
    kv_heads, heads = old.get(name), next((old[n] for n in _HEADS if is_size(old.get(n))), None)
    if kv_heads == heads:
        return NUM_HEADS
    return 1 if kv_heads == 1 else NUM_HEADS // 2


def _shrink_rotary(small: dict[str, Any], old: Settings) -> None:
    """Set head sizes such that every rotary share is an even integer, and the settings that repeat them."""
    heads = next((old[name] for name in _HEADS if is_size(old.get(name))), 1)
    hidden = next((old[name] for name in _HIDDEN if is_size(old.get(name))), 0)
    old_head = old["head_dim"] if is_size(old.get("head_dim")) else hidden // heads
    shares, rotary = set(_rotary_shares(old)), old.get("qk_rope_head_dim")
    repeated = {share for share in shares if int(old_head * share) == rotary != old_head}
    head = next((h for h in _HEAD_DIMS if _fits(h, shares - repeated) and _fits(h, repeated, ROTARY)), HEAD_DIM)
    if is_size(small.get("head_dim")):
        small["head_dim"] = head
    elif head != HEAD_DIM:
        small |= {name: NUM_HEADS * head for name in _HIDDEN if name in small}
    if is_size(small.get("rotary_dim")) and old_head:
        small["rotary_dim"] = max(4, head * old["rotary_dim"] // old_head)
    if is_size(rotary) and "qk_rope_head_dim" in small:
        _shrink_latent_heads(small, old)
        old_head, head = old["qk_rope_head_dim"], small["qk_rope_head_dim"]
    for rope in ("rope_parameters", "rope_scaling"):
        if isinstance(small.get(rope), dict) and old_head:
            small[rope] = _shrunk_rope(small[rope], head, old_head)


def _rotary_shares(settings: Settings) -> Iterator[float]:
    """Yield every `partial_rotary_factor`, of all layers or of those of one type."""
    for name, value in settings.items():
        if name == "partial_rotary_factor" and isinstance(value, int | float) and value > 0:
            yield float(value)
        elif name.startswith("rope_") or (isinstance(value, dict) and "rope_type" in value):
            yield from _rotary_shares(cast("Settings", value) if isinstance(value, dict) else {})


def _fits(head: int, shares: Iterable[float], rotary: int | None = None) -> bool:
    """Return whether each share of a head is a valid number of rotary dimensions, or equals `rotary`."""
    sizes = [int(head * share) for share in shares]
    return all(size % 2 == 0 and size >= 4 and rotary in (None, size) for size in sizes)


def _shrink_latent_heads(small: dict[str, Any], old: Settings) -> None:
    """Set heads in two parts, with and without rotation, and the settings that repeat one or both."""
    if old.get("qk_nope_head_dim") == old["qk_rope_head_dim"] and "qk_nope_head_dim" in small:
        small["qk_nope_head_dim"] = small["qk_rope_head_dim"]  # configs name the share of a head that is rotated
    rotary, plain = small["qk_rope_head_dim"], small.get("qk_nope_head_dim", 0)
    if "qk_head_dim" in small:
        small["qk_head_dim"] = plain + rotary
    if old.get("head_dim") == old["qk_rope_head_dim"]:
        small["head_dim"] = rotary
    elif is_size(old.get("head_dim")) and old["head_dim"] == old.get("qk_nope_head_dim", 0) + old["qk_rope_head_dim"]:
        small["head_dim"] = plain + rotary


def _shrunk_rope(rope: dict[str, Any], head: int, old_head: int) -> dict[str, Any]:
    """Return rope settings with lists of the small heads' length; those per layer type each separately."""
    small = dict(rope)
    for name, value in rope.items():
        if isinstance(value, dict):
            small[name] = _shrunk_rope(cast("dict[str, Any]", value), head, old_head)
        elif name in ("short_factor", "long_factor") and isinstance(value, list):
            factors = cast("list[float]", value)
            small[name] = factors[: max(1, len(factors) * head // old_head)]
        elif name == "mrope_section" and isinstance(value, list):
            small[name] = _sections(cast("list[int]", value), head, old_head)
    return small


def _sections(sections: Sequence[int], head: int, old_head: int) -> list[int]:
    """Return the frequencies of each axis: equal ones stay equal, and the one that is alone gets the remainder."""
    small = [max(1, section * head // old_head) for section in sections]
    alone = next((i for i, section in enumerate(sections) if sections.count(section) == 1), 0)
    small[alone] += max(1 - small[alone], sum(sections) * head // old_head - sum(small))
    return small


def _shrink_groups(small: dict[str, Any], old: Settings) -> None:
    for groups, kept in _GROUPS.items():
        if not is_size(old.get(groups)) or old[groups] == 1 or groups not in small:
            continue
        top_k = next((small[name] for name in TOP_KS if is_size(small.get(name))), TOP_K)
        small[groups] = NUM_GROUPS
        if is_size(old.get(kept)):
            small[kept] = NUM_GROUPS if old[kept] == old[groups] else max(1, min(TOPK_GROUP, top_k - 1))


def _shrink_state_space_heads(small: dict[str, Any], old: Settings) -> None:
    """Set the heads of a state-space layer to fill its inner width, `expand` times the hidden size."""
    for heads, width, expand in _STATE_SPACE:
        if is_size(old.get(heads)) and heads in small and is_size(old.get(width)) and old.get(expand):
            small[heads] = int(old[expand]) * HIDDEN // small[width]
            if is_size(small.get("mamba_d_ssm")):
                small["mamba_d_ssm"] = small[heads] * small[width]

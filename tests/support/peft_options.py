"""Every kind of adapter of the installed PEFT and every field of `LoraConfig`: values to try, or why there are none.

The tests compare the keys with PEFT's own tables, so a new kind or field appears there by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

Q: Final = {"target_modules": ["q_proj", "v_proj"]}
_CAUSAL: Final = {"task_type": "CAUSAL_LM"}
_TOKENS: Final = {"num_virtual_tokens": 4, **_CAUSAL}

KINDS: Final[Mapping[str, Mapping[str, Any] | str]] = {
    "LORA": {"r": 4, **Q},
    "ADALORA": {"init_r": 4, "target_r": 2, "total_step": 10, **Q},
    "ADAMSS": "needs scikit-learn, which no one of ktc's extras installs",
    "ADAPTION_PROMPT": "PEFT makes it for a few dense families",
    "BEFT": {"target_modules": ["v_proj"]},
    "BOFT": {"boft_block_size": 4, **Q},
    "C3A": {"block_size": 16, **Q},
    "CARTRIDGE": _TOKENS,
    "CPT": {"cpt_token_ids": [1, 2, 3, 4], "cpt_mask": [1] * 4, "cpt_tokens_type_mask": [1] * 4, **_CAUSAL},
    "DEFT": {"r": 4, **Q},
    "DELORA": {"r": 4, **Q},
    "FOURIERFT": {"n_frequency": 20, **Q},
    "FROD": {"progressbar": False, **Q},
    "GLORA": {"r": 4, **Q},
    "GRALORA": {"r": 4, **Q},
    "HIRA": {"r": 4, **Q},
    "HRA": {"r": 4, **Q},
    "IA3": {"target_modules": ["q_proj", "v_proj"], "feedforward_modules": []},
    "LILY": {"r": 4, **Q},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "LOHA": {"r": 4, **Q},
    "LOKR": {"r": 4, **Q},
    "MISS": {"r": 4, **Q},
    "OFT": {"oft_block_size": 16, **Q},
    "SHIRA": {"r": 4, "random_seed": 0, **Q},
    "PROMPT_TUNING": _TOKENS,
    "MULTITASK_PROMPT_TUNING": "every call of the model names the task",
    "OSF": {"effective_rank": 4, **Q},
    "P_TUNING": {"encoder_hidden_size": 16, **_TOKENS},
    "PEANUT": {"r": 4, **Q},
    "POLY": "every call of the model names the task",
    "PREFIX_TUNING": _TOKENS,
    "PSOFT": {"r": 4, **Q},
    "PVERA": {"r": 4, **Q},
    "RANDLORA": {"r": 4, **Q},
    "ROAD": {"group_size": 16, **Q},
    "SHADOW": {"r": 4, **_CAUSAL},
    "SUPERTUNING": {"sparsity": 0.5, **Q},
    "TINYLORA": {"u": 8, **Q},
    "TRAINABLE_TOKENS": {"token_indices": [17, 33]},
    "UNILORA": {"r": 4, **Q},
    "VBLORA": {"r": 4, "num_vectors": 8, "vector_length": 16, **Q},
    "VERA": {"r": 4, **Q},
    "WAVEFT": {"n_frequency": 20, **Q},
    "XLORA": "a mixture of other adapters, whose folders it names",
}

KINDS_REFUSED: Final = {
    "CARTRIDGE": "A604", "CPT": "A604", "PROMPT_TUNING": "A604", "P_TUNING": "A604", "PREFIX_TUNING": "A604",
    "SHADOW": "A604", "GLORA": "A603",
}  # fmt: skip
FIELDS_REFUSED: Final = {
    "layer_replication [[0, 2], [1, 2]]": "A604", "init_lora_weights pissa_niter_4": "A604",
    "modules_to_save ['mlp']": "A604", "modules_to_save ['experts']": "A604",
}  # fmt: skip

_HEAD: Final = {"target_modules": ["q_proj", "lm_head"]}
_EXPERTS: Final = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
_METADATA: Final = "says where the adapter is from, and no code computes with it"

FIELDS: Final[Mapping[str, tuple[Mapping[str, Any], ...] | str]] = {
    "r": ({"r": 1}, {"r": 16}),
    "target_modules": (
        {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        {"target_modules": r".*layers\.1\..*\.(q|o)_proj"},
        {"target_modules": "all-linear"},
        _HEAD,
        {"target_modules": ["lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj", "gate"]},
    ),
    "exclude_modules": ({"exclude_modules": ["v_proj"]}, {"exclude_modules": r".*layers\.0\..*"}),
    "lora_alpha": ({"lora_alpha": 3}, {"lora_alpha": 64}),
    "lora_dropout": ({"lora_dropout": 0.2},),
    "fan_in_fan_out": ({"fan_in_fan_out": True},),
    "bias": ({"bias": "all"}, {"bias": "lora_only"}),
    "use_rslora": ({"use_rslora": True},),
    "modules_to_save": (
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["input_layernorm"]},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"modules_to_save": ["o_proj"]},
        {"modules_to_save": ["gate"]},
        {"modules_to_save": ["self_attn"], "target_modules": ["gate"]},
        {"modules_to_save": ["mlp"]},
        {"modules_to_save": ["experts"]},
    ),
    "init_lora_weights": tuple(
        {"init_lora_weights": each}
        for each in (True, False, "gaussian", "orthogonal", "pissa", "pissa_niter_4", "olora", "eva", "lora_ga")
    ),  # CorDA needs data, LoftQ scipy; their files are those of PiSSA
    "layers_to_transform": ({"layers_to_transform": [1]}, {"layers_to_transform": 0}),
    "layers_pattern": ({"layers_to_transform": [1], "layers_pattern": "layers"},),
    "rank_pattern": ({"rank_pattern": {"v_proj": 2}}, {"rank_pattern": {r".*layers\.1\.self_attn\.q_proj": 8}}),
    "alpha_pattern": ({"alpha_pattern": {"v_proj": 2}},),
    "megatron_config": "a module that the file names is imported (A602)",
    "megatron_core": "read with `megatron_config` alone",
    "trainable_token_indices": (
        {"trainable_token_indices": [17, 33]},
        {"trainable_token_indices": {"embed_tokens": [5, 44]}},
        {"trainable_token_indices": {"embed_tokens": [5], "lm_head": [44]}},
        {"trainable_token_indices": [17], **_HEAD},
    ),
    "loftq_config": "read by an initialisation alone (`init_lora_weights`), of which the file has the result",
    "eva_config": "read by an initialisation alone (`init_lora_weights`), of which the file has the result",
    "corda_config": "read by an initialisation alone (`init_lora_weights`), of which the file has the result",
    "lora_ga_config": "read by an initialisation alone (`init_lora_weights`), of which the file has the result",
    "use_dora": ({"use_dora": True}, {"use_dora": True, "target_modules": ["q_proj", "embed_tokens"]}),
    "velora_config": ({"velora_config": {}},),
    "alora_invocation_tokens": ({"alora_invocation_tokens": [33, 9], **_CAUSAL},),
    "use_qalora": ({"use_qalora": True},),
    "qalora_group_size": ({"use_qalora": True, "qalora_group_size": 8},),
    "monteclora_config": ({"monteclora_config": {"num_samples": 2}},),
    "layer_replication": ({"layer_replication": [[0, 2], [1, 2]]},),
    "runtime_config": "of one process: PEFT does not save it",
    "lora_bias": ({"lora_bias": True},),
    "target_parameters": (
        {"target_parameters": _EXPERTS},
        {"target_parameters": [_EXPERTS[1]]},
        {"target_modules": [], "target_parameters": _EXPERTS},
        {"target_parameters": ["mlp.gate.weight"]},
        {"target_parameters": _EXPERTS, "trainable_token_indices": [17]},
        {"target_parameters": _EXPERTS, **_HEAD},
    ),
    "use_bdlora": ({"use_bdlora": {"target_modules_bd_a": ["q_proj"], "nblocks": 2, "match_strict": False}},),
    "arrow_config": "of a router over other adapters that are attached, which PEFT does not save",
    "kasa_config": ({"kasa_config": {}},),
    "ensure_weight_tying": (
        {"ensure_weight_tying": True, "modules_to_save": ["embed_tokens"]},
        {"ensure_weight_tying": True, "modules_to_save": ["lm_head"]},
        {"ensure_weight_tying": True, "trainable_token_indices": [17]},
        {"ensure_weight_tying": True, "target_modules": ["q_proj", "embed_tokens"]},
    ),
    "task_type": ({"task_type": "CAUSAL_LM"},),
    "peft_type": "`KINDS` has all of them",
    "auto_mapping": _METADATA,
    "peft_version": _METADATA,
    "base_model_name_or_path": _METADATA,
    "revision": _METADATA,
    "inference_mode": ({"inference_mode": True},),
}


def rows_of_fields() -> list[tuple[str, Mapping[str, Any]]]:
    """Every row with a label: the field, and the value or the names of what is beside it."""
    rows = [(name, row) for name, values in FIELDS.items() if not isinstance(values, str) for row in values]
    return [(f"{name} {row.get(name, [*row])}", {"r": 4, **Q, **row}) for name, row in rows]

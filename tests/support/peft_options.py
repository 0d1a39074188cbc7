"""Every kind of adapter of the installed PEFT and every field of `LoraConfig`, with values to try or why there are none.

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
    "ADAMSS": {"r": 8, "num_subspaces": 2, "subspace_rank": 2, **Q},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 1, **_CAUSAL},
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
    "MULTITASK_PROMPT_TUNING": _TOKENS,
    "OSF": {"effective_rank": 4, **Q},
    "P_TUNING": {"encoder_hidden_size": 16, **_TOKENS},
    "PEANUT": {"r": 4, **Q},
    "POLY": {"r": 4, "n_skills": 2, **Q},
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

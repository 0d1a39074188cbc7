"""The architectures of GGUF files that ktc reads, and the `gguf` package's names for the tensors of transformers.

Converters may change more than names. The modules that read or write such files (`ktc.stages.capture.gguf_names`,
`ktc.adapters.gguf`) list these changes per architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, cast

from ktc.foundation import versions

# Architectures of GGUF and the models of transformers that are converted to them. All but `llama` and `deepseek2` only
# rename and stack; `llama` orders the rows of q and k by pairs; `deepseek2` may split `kv_b_proj`.
ARCHITECTURES: Mapping[str, tuple[str, ...]] = {
    "qwen2moe": ("qwen2_moe",),
    "qwen3moe": ("qwen3_moe",),
    "olmoe": ("olmoe",),
    "gpt-oss": ("gpt_oss",),
    "llama": ("mixtral",),
    "deepseek2": ("deepseek_v2", "deepseek_v3", "kimi_k25"),
    "qwen3vlmoe": ("qwen3_vl_moe", "qwen3_moe"),  # of its part for text
}
# Names of transformers that differ in the package's table.
_SPELLED = (("e_score_correction_bias", "e_score_correction.bias"), ("self_attn.sinks", "self_attn.sinks.weight"))


def gguf_architecture(model_type: str) -> str | None:
    """Return the architecture of a model's GGUF files, None if none is known."""
    return next((name for name, kinds in ARCHITECTURES.items() if model_type in kinds), None)


@cache
def gguf_name_of(architecture: str, layers: int) -> Callable[[str], str | None]:
    """Return a function from a tensor's name in transformers to its name in the file, `None` if it has none."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    table = cast("Mapping[Any, str]", MODEL_ARCH_NAMES)
    number = next(key for key, name in table.items() if name == architecture)
    names = get_tensor_name_map(MODEL_ARCH(number), layers)

    def name_of(target: str) -> str | None:
        target = target.replace("language_model.", "", 1)  # of a model with towers
        for spelled, other in _SPELLED:
            target = target.removesuffix(spelled) + other if target.endswith(spelled) else target
        return names.get_name(target, try_suffixes=(".weight", ".bias"))

    return name_of


def without_gguf_name(architecture: str, layers: int, names: Iterable[str]) -> tuple[str, ...]:
    """Return the `names` that files of `architecture` have none for; nothing where the package `gguf` is missing.

    `layers` of the model, 0 if unknown.
    """
    if not layers or versions.installed("gguf") is None:
        return ()
    name_of = gguf_name_of(architecture, layers)
    return tuple(name for name in names if name_of(name) is None)

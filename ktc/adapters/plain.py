"""Kinds of LoRA that are more than `W + s B A`, which exports and merges refuse.

In: the JSON object of a config. Out: reasons with hints; none for a plain LoRA.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

PLAIN_HINT: Final = "ktc converts and merges adapters that are `W + s B A` alone; use this one with peft"
# Kinds of LoRA whose weights are not `W + s B A` of the base as it is, by their key in the config.
_VARIANTS: Final = (
    "use_dora", "use_qalora", "lora_bias", "layer_replication", "trainable_token_indices",
    "alora_invocation_tokens", "fan_in_fan_out", "use_bdlora", "megatron_config", "arrow_config", "kasa_config",
    "velora_config",
)  # fmt: skip
_PLAIN_INITS: Final = (True, False, "gaussian", "orthogonal", "eva", None)  # the others change the base's weights


def variants(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the features of a config that a plain LoRA does not have, each with a hint."""
    for key in _VARIANTS:
        if config.get(key):
            yield f"has `{key}`, which is more than a plain LoRA", PLAIN_HINT
    if config.get("bias", "none") != "none":
        yield "trains biases, which is more than a plain LoRA", PLAIN_HINT
    init = config.get("init_lora_weights", True)
    if init not in _PLAIN_INITS:
        what = f"was begun with `{init}`, which changes the weights of the base"
        yield what, "save it with `path_initial_model_for_weight_conversion`"

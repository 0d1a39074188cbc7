"""The stock model of a config as `AutoModelForCausalLM` makes it: from the part of the config that its class takes.

Input: a config, and where it is known the model's class, which may be derived from the stock one. Output: the model on
meta tensors. Compiling and loading build it here, so both have the same modules by the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ktc.model.hf.private_api import model_of_config


def build_on_meta(
    config: PreTrainedConfig, dtype: torch.dtype, model_class: type[PreTrainedModel] | None = None, **options: Any
) -> PreTrainedModel:
    """Return the model of `config` without storage, in evaluation mode.

    Its class is `model_class`, or the one that transformers chooses. `options` are those of `from_config`. Raises what
    the model's code raises on its config.
    """
    with torch.device("meta"):
        if model_class is None:
            made = cast("Any", AutoModelForCausalLM).from_config(config, dtype=dtype, **options)
        else:
            made = model_of_config(model_class, part_of(model_class, config), dtype=dtype, **options)
    return cast("PreTrainedModel", made).eval()


def part_of(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config that `AutoModelForCausalLM` gives to `model_class`: all of it, or its part for text.

    The config of a model with images or sound has a part for each. A class that takes the text's part alone gets that.
    """
    wanted = cast("dict[str, Any]", config.sub_configs).get("text_config")
    if wanted is None or getattr(model_class, "config_class", None) is not wanted:
        return config
    part = config.get_text_config()
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        part.quantization_config = quantised
    return part


def quantization_config_of(config: PreTrainedConfig) -> Mapping[str, Any] | None:
    """Return `quantization_config` of config.json, or of its part for text, as plain values; `None` if missing."""
    values = (getattr(part, "quantization_config", None) for part in (config, config.get_text_config()))
    settings = next(filter(None, values), None)
    return cast("Mapping[str, Any] | None", settings if isinstance(settings, dict | None) else settings.to_dict())


def vocabulary_of(model: PreTrainedModel) -> int:
    """Return the number of tokens: of the config, or of the embedding where the config has a part of another name."""
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) else int(cast("Any", model.get_input_embeddings()).weight.shape[0])

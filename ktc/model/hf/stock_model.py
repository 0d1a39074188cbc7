"""The stock model of a config: the class that transformers chooses, made from the part of the config that it takes.

Input: a config, and where it is known the model's class, which may be derived from the stock one. Output: the model.
Compiling and loading build it here, so both have the same modules by the same names. A config with parts for images or
sound that names such a class is the whole model with its towers; the others are as `AutoModelForCausalLM` makes them.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from ktc.model.hf.private_api import model_of_config

log = logging.getLogger(__name__)


def build_on_meta(
    config: PreTrainedConfig, dtype: torch.dtype, model_class: type[PreTrainedModel] | None = None, **options: Any
) -> PreTrainedModel:
    """Return the model of `config` without storage, in evaluation mode.

    Its class is `model_class`, or the one that transformers chooses. `options` are those of `from_config`. Raises what
    the model's code raises on its config.
    """
    with torch.device("meta"):
        return build(config, dtype, model_class, **options)


def build(
    config: PreTrainedConfig, dtype: torch.dtype, model_class: type[PreTrainedModel] | None = None, **options: Any
) -> PreTrainedModel:
    """Return the model of `config` in evaluation mode, as `build_on_meta` does, with the storage of the context."""
    model_class = model_class or multimodal_class(config)
    if model_class is None:
        made = cast("Any", AutoModelForCausalLM).from_config(_text_of(config), dtype=dtype, **options)
    else:
        made = model_of_config(model_class, part_of(model_class, config), dtype=dtype, **options)
    return cast("PreTrainedModel", made).eval()


def _text_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of a causal LM's class: transformers 5.6 gives it the whole one, which lacks its sizes."""
    known = cast("Mapping[type[PreTrainedConfig], type[PreTrainedModel]]", MODEL_FOR_CAUSAL_LM_MAPPING)
    part = part_of(known.get(type(config), PreTrainedModel), config)
    return part if type(part) in known else config


def multimodal_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class with towers for images or sound that `config` is of; `None` for a model of text.

    It is the class of `AutoModelForImageTextToText`, if `architectures` names it or no causal LM takes the config. A
    config of a model's own code has none.
    """
    name = multimodal_name(config.model_type)
    written: object = config.architectures  # of a file that anybody may have written
    listed = cast("list[object]", written) if isinstance(written, list) else []
    is_named, has_own_code = name in listed, not type(config).__module__.startswith("transformers.")
    if name is None or has_own_code or not (is_named or config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        return None
    return cast("type[PreTrainedModel] | None", getattr(transformers, name, None))


def multimodal_name(model_type: str) -> str | None:
    """Return the name of the class of images and text of a model type, if transformers has one."""
    return cast("dict[str, str]", MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES).get(model_type)


def text_class_name(config: PreTrainedConfig) -> str | None:
    """Return the name of the class that reads the text alone of a checkpoint with towers, if transformers has one."""
    name = cast("dict[str, str]", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES).get(config.model_type)
    return None if name == multimodal_name(config.model_type) else name


def finds_positions(model: nn.Module) -> bool:
    """Return whether code of `model` finds positions of several axes by the images of a prompt, in each step.

    Such a model keeps how far the positions behind images differ from the number of tokens: its steps are not those of
    a model of text.
    """
    return any(hasattr(module, "get_rope_index") for module in model.modules())


def forget_positions(model: nn.Module) -> None:
    """Forget how far positions behind images differ: stock code takes those of the last prompt where it has no mask."""
    for module in model.modules():
        if hasattr(module, "get_rope_index") and getattr(module, "rope_deltas", None) is not None:
            cast("Any", module).rope_deltas = None


def has_towers(model: PreTrainedModel) -> bool:
    """Return whether `model` reads images or sound beside text: its config has a part for text alone."""
    return type(model).__name__ == multimodal_name(model.config.model_type) and bool(
        cast("dict[str, Any]", model.config.sub_configs)
    )


def left_out_bytes(model: PreTrainedModel, config: PreTrainedConfig) -> int:
    """Return the bytes of parameters that the whole model of `config` has besides those of `model`, a part for text.

    They are 0 for a model with all of its parts, and where the installed transformers cannot build the whole.
    """
    name = multimodal_name(config.model_type)
    whole_class = cast("type[PreTrainedModel] | None", getattr(transformers, name or "", None))
    if whole_class is None or isinstance(model, whole_class) or not config.sub_configs:
        return 0
    try:
        whole = build_on_meta(copy.deepcopy(config), model.dtype, whole_class)
    except Exception:  # towers that are left out may be of another version, and their code raises anything
        log.warning("the towers that are left out cannot be built, so their size is not known", exc_info=True)
        return 0
    return max(0, parameter_bytes(whole) - parameter_bytes(model))


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters, which may be on meta."""
    return sum(parameter.nbytes for parameter in model.parameters())


def text_tower(model: PreTrainedModel) -> nn.Module:
    """Return the part of `model` that holds the layers of its language model: all of a model of text."""
    return cast("nn.Module", cast("Any", model).get_decoder()) if has_towers(model) else model


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

"""Find the model families of the installed transformers that have routed experts, from its code, without a list.

A family is a `model_type` that `AutoModelForCausalLM` knows. Its modeling code is first read as text, which imports
nothing. Candidates are then built, shrunk, on meta tensors twice: a family has experts if its size grows with their
number, in any storage. Refused: a model type that the installed transformers does not know.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from ktc.diagnostics import Diagnostic, InputRefused, suggest
from ktc.model.hf.stock_model import multimodal_name
from ktc.model.twin.shrink import shrink
from ktc.model.twin.sizes import EXPERT_COUNTS, NUM_EXPERTS, TOP_KS

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

_READS_LIKE_EXPERTS = re.compile(r"expert", re.IGNORECASE), re.compile(r"top_?k", re.IGNORECASE)
_NAMES_EXPERTS = re.compile(r"^class \w*Experts?\w*\(", re.MULTILINE)
# Defaults that some classes leave open although every checkpoint sets them: whether there are experts, their number and
# their width.
_SWITCHES = ("enable_moe_block", "is_moe")
_LEFT_OPEN: Mapping[str, object] = {
    **dict.fromkeys(EXPERT_COUNTS, 64),
    **dict.fromkeys(TOP_KS, 8),
    "n_shared_experts": 1,
    "moe_intermediate_size": 512,
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}
# The same for parts of a config. The code reads them, and every checkpoint sets them.
_PARTS_LEFT_OPEN: Mapping[str, Mapping[str, object]] = {
    "attn_config": {"rope_theta": 500_000.0, "clip_qkv": 8.0},
    "ffn_config": {"moe_top_k": 4},
}


@cache
def moe_families() -> tuple[str, ...]:
    """Return the model types whose causal LMs have routed experts, each architecture once, in alphabetical order.

    If a model type wraps another one (images, audio), only the type whose own config builds the causal LM is returned.
    A family whose shrunk model cannot be built stays in the list if its code defines a class of experts.
    """
    return tuple(sorted(_families_with_experts()))


@cache
def whole_families() -> tuple[str, ...]:
    """Return the model types of images and text whose language model has routed experts, in alphabetical order."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    known = cast("Mapping[str, object]", MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    parts = {kind: CONFIG_MAPPING[kind]().get_text_config() for kind in known if kind in CONFIG_MAPPING}
    return tuple(sorted(kind for kind, text in parts.items() if any(hasattr(text, name) for name in EXPERT_COUNTS)))


def default_config(model_type: str, *, whole: bool = False) -> PretrainedConfig:
    """Return the config of the language model by the family's own defaults, with experts, or with its towers `whole`.

    Values that the defaults leave open (None, or a single expert) but a checkpoint always sets get a usual value.
    Raises InputRefused (I103) for a model type that the installed transformers does not know.
    """
    from transformers import CONFIG_MAPPING
    from transformers import __version__ as version

    if model_type not in CONFIG_MAPPING:
        message = f"the installed transformers knows no model type `{model_type}`"
        known = list(CONFIG_MAPPING)
        raise InputRefused(Diagnostic("I103", message, hint=suggest(model_type, known) or f"its version is {version}"))
    composite = CONFIG_MAPPING[model_type]()
    config = composite.get_text_config()
    if whole and config is not composite:
        return _with_towers(composite, model_type)
    settings: dict[str, Any] = config.to_dict()
    filled = _filled(settings, model_type)
    return type(config).from_dict({**settings, **filled}) if filled else config


def _with_towers(config: PretrainedConfig, model_type: str) -> PretrainedConfig:
    """Return the config of a family with towers, its part for text filled, that names the class of images and text."""
    text = config.get_text_config()
    name = next(name for name, part in vars(config).items() if part is text)
    settings: dict[str, Any] = config.to_dict()
    part = cast("dict[str, Any]", settings[name])
    settings[name] = {**part, **_filled(part, model_type)}
    settings["architectures"] = [multimodal_name(model_type)]
    if settings.get("vision_config", 0) is None:  # every checkpoint with images has it
        settings["vision_config"] = {}
    return type(config).from_dict(settings)


def _filled(settings: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Return usual values for the settings that a family's defaults leave open."""
    filled = {name: value for name, value in _LEFT_OPEN.items() if name in settings and settings[name] is None}
    filled |= {name: True for name in _SWITCHES if settings.get(name) is False}
    alone = [name for name in EXPERT_COUNTS if settings.get(name) == 1]
    if alone:
        filled |= {name: _LEFT_OPEN[name] for name in (*alone, *TOP_KS) if name in settings}
    if settings.get("head_dim", 0) is None:
        filled["head_dim"] = settings["hidden_size"] // settings["num_attention_heads"]
    if settings.get("layer_types", 0) is None:
        kinds = _layer_kinds(model_type)
        if kinds:
            filled["layer_types"] = [kinds[i % len(kinds)] for i in range(settings["num_hidden_layers"])]
    for name, usual in _PARTS_LEFT_OPEN.items():
        if isinstance(settings.get(name), dict):
            part = cast("dict[str, Any]", settings[name])
            filled[name] = {**part, **{key: value for key, value in usual.items() if part.get(key) in (None, 1)}}
    return filled


def _layer_kinds(model_type: str) -> list[str]:
    """Return the types of layers that the family's modeling code distinguishes."""
    from transformers.configuration_utils import ALLOWED_LAYER_TYPES

    code = _modeling_code(model_type)
    return [kind for kind in cast("tuple[str, ...]", ALLOWED_LAYER_TYPES) if f'"{kind}"' in code]


def _families_with_experts() -> Iterator[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = cast("Mapping[str, object]", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    for model_type in known:
        code = _modeling_code(model_type)
        if not all(pattern.search(code) for pattern in _READS_LIKE_EXPERTS):
            continue
        try:
            config = default_config(model_type)
            if config.model_type != model_type and config.model_type in known:
                continue
            has_experts = _tensor_sizes(config, 4 * NUM_EXPERTS) > _tensor_sizes(config, NUM_EXPERTS)
        except Exception:  # noqa: BLE001 - foreign code on its own defaults raises anything; then its text decides
            has_experts = _NAMES_EXPERTS.search(code) is not None
        if has_experts:
            yield model_type


def _modeling_code(model_type: str) -> str:
    """Return the text of the family's modeling file, empty if it has none."""
    from transformers.models.auto import configuration_auto

    package: str = configuration_auto.model_type_to_module_name(model_type)
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).parent.joinpath("models", *package.split(".")) / f"modeling_{package.split('.')[-1]}.py"
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _tensor_sizes(config: PretrainedConfig, experts: int) -> int:
    """Return the number of elements of the shrunk model of `config` with this many experts."""
    from transformers import AutoModelForCausalLM

    small = shrink(config)
    for holder in (small, *(part for part in vars(small).values() if hasattr(part, "to_dict"))):
        for name in EXPERT_COUNTS:
            if getattr(holder, name, None):
                setattr(holder, name, experts)
    with torch.device("meta"):
        model = cast("nn.Module", AutoModelForCausalLM.from_config(small))
    return sum(tensor.numel() for tensor in cast("dict[str, torch.Tensor]", model.state_dict()).values())

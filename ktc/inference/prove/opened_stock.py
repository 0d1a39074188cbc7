"""The stock model of a compiled folder: built on meta from the checkpoint's config, ready for its values.

In: an opened folder. Out: a `StockModel`, its layers' names and its vocabulary. No weight is read. Refused: a model
whose rewrites are not in one list of layers (N602).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ktc.inference.prove.compiled import Opened
from ktc.inference.prove.layers import list_of_layers
from ktc.inference.prove.stock import StockModel, own_dtypes
from ktc.model.hf import remote_code
from ktc.model.hf.stock_model import vocabulary_of
from ktc.model.loading.load_as import build_on_meta
from ktc.model.manifest.manifest import Manifest


@dataclass(frozen=True, slots=True)
class OpenedStock:
    """`layers` names the list of decoder layers, `groups` each of them. `collects_router_logits`: by its config."""

    model: StockModel
    layers: str
    groups: tuple[str, ...]
    dtype: torch.dtype
    vocabulary: int
    collects_router_logits: bool


def open_stock(opened: Opened) -> OpenedStock:
    """Build the stock model on meta. Raises InputRefused (N602)."""
    manifest = opened.manifest
    config = _config(opened)
    collects = bool(getattr(config, "output_router_logits", False))
    if collects:  # they come from layers that are replaced while calls are recorded
        config.update({"output_router_logits": False})

    def built(reference: bool) -> PreTrainedModel:
        return build_on_meta(opened.stock_class, copy.deepcopy(config), manifest, None, reference)

    dtype = cast("torch.dtype", getattr(torch, manifest.model.dtype))
    dtypes = own_dtypes(built(reference=False), dtype)
    model = built(reference=True)
    _in_their_own_loop(model, manifest)
    layers = list_of_layers(model, manifest.rewrites)
    groups = tuple(f"{layers}.{index}" for index in range(len(cast("Any", model.get_submodule(layers)))))
    stock = StockModel(model, dtypes, layers, opened.index, opened.rows)
    return OpenedStock(stock, layers, groups, dtype, vocabulary_of(model), collects)


def _in_their_own_loop(model: PreTrainedModel, manifest: Manifest) -> None:
    """Let experts that are replaced add up in the order of their class' own loop, as kernels do.

    Kept ones run by the implementation that stock chooses, as in the compiled model.
    """
    for step in manifest.rewrites:
        experts = cast("Any", model.get_submodule(step.fqn))
        if step.module == "fused_moe" and isinstance(getattr(experts, "config", None), PreTrainedConfig):
            experts.config = copy.copy(experts.config)
            experts.config._experts_implementation_internal = "eager"


def _config(opened: Opened) -> PreTrainedConfig:
    """Return the checkpoint's own config, and not the copy in OUT."""
    own = remote_code.config_class_of(opened.stock_class)
    return cast("PreTrainedConfig", (own or AutoConfig).from_pretrained(opened.index.folder))

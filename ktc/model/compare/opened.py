"""A compiled folder opened for a comparison, and its stock model on meta.

In: OUT and its checkpoint. Out: an `Opened`, and a `StockModel` without values. Refused: what `ktc.load` refuses, and a
model whose rewrites are not in one list of layers (N602).
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ktc.model.compare.groups import list_of_layers
from ktc.model.compare.stock import StockModel, own_dtypes
from ktc.model.hf import remote_code
from ktc.model.hf.private_api import EXPERTS
from ktc.model.loading import load_as
from ktc.model.loading.opened import Opened, open_folder
from ktc.model.manifest.manifest import Manifest
from ktc.model.packed_store import weights_stage
from ktc.model.packed_store.placement import check_devices


def open_compiled(path: Path, weights: Path | None, trusted: bool) -> Opened:
    """Open the compiled model in `path`, with its packed store. Raises as `ktc.load` does."""
    opened = open_folder(path, weights, trusted=trusted)
    check_devices(opened.manifest.devices)
    if opened.library is None:
        return opened
    store = weights_stage.usable_store(opened.folder, opened.manifest, opened.rows, opened.index, map=False)
    return replace(opened, store=store)


def open_stock(opened: Opened) -> StockModel:
    """Build the stock model on meta, without router logits: layers are replaced while calls are recorded.

    Raises:
        InputRefused: N602.
    """
    config = _config(opened)
    without_router_logits(config)

    def built(reference: bool) -> PreTrainedModel:
        return load_as.build_on_meta(opened.stock_class, copy.deepcopy(config), opened.manifest, None, reference)

    dtypes = own_dtypes(built(reference=False), cast("torch.dtype", getattr(torch, opened.manifest.model.dtype)))
    model = built(reference=True)
    _in_their_own_loop(model, opened.manifest)
    return StockModel(model, dtypes, list_of_layers(model, opened.manifest.rewrites), opened.index, opened.rows)


def without_router_logits(config: PreTrainedConfig) -> None:
    """Set a config to collect no router logits, if it does."""
    if getattr(config, "output_router_logits", False):
        config.update({"output_router_logits": False})


def _in_their_own_loop(model: PreTrainedModel, manifest: Manifest) -> None:
    """Let experts that are replaced add their outputs in the order of their class' own loop, as kernels do.

    Other experts run by the implementation that stock chooses, as in the compiled model.
    """
    for step in manifest.rewrites:
        experts = cast("Any", model.get_submodule(step.fqn))
        if step.module == "fused_moe" and isinstance(getattr(experts, "config", None), PreTrainedConfig):
            experts.config = copy.copy(experts.config)
            setattr(experts.config, EXPERTS, "eager")


def _config(opened: Opened) -> PreTrainedConfig:
    """Return the checkpoint's own config, and not the copy in OUT."""
    of_model = remote_code.config_class_of(opened.stock_class)
    return cast("PreTrainedConfig", (of_model or AutoConfig).from_pretrained(opened.index.folder))

"""The peer of whole models: stock Hugging Face with random weights, as a whole on one device.

In: the layers of a run. Out: the model in bf16, whose experts run by `grouped_mm`, the fastest that stock has; for the
steps of `generate` transformers itself changes that to `batched_mm`. Weights are random in any case: their values do
not change the speed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ktc.model.checkpoint import open_index
from ktc.model.loading.buffers import compute_buffers
from ktc.model.packed_store.random_weights import fill_random
from ktc.model.packed_store.weight_store import fill
from ktc.stages.capture import open_model
from ktc.stages.capture.model import build_on_meta
from ktc.stages.capture.weights import map_weights
from ktc.stages.plan.placement import gib
from ktc.tools.bench.stack import Stack


def reason_against(stack: Stack) -> str:
    """Return why the peer cannot run here, "" if it can."""
    if not torch.cuda.is_available():
        return "it needs a GPU, and this process sees none"
    held, free = _bytes(_on_meta(stack)), torch.cuda.mem_get_info(0)[1]
    return f"its weights need {gib(held)}, and the GPU has {gib(free)}" if held > free else ""


def stock_model(stack: Stack, device: str, seed: int, progress: Callable[[int, int], None]) -> PreTrainedModel:
    """Return the model on `device`, in evaluation mode."""
    model = _on_meta(stack)
    fill_random(model, {"": device}, seed, progress)
    compute_buffers(model, {"": device})
    model.tie_weights()
    return model.eval()


def of_checkpoint(folder: Path, config: Any) -> PreTrainedModel:
    """Return the stock model in bf16 on the CPU with the weights of a checkpoint, dequantised."""
    model = build_on_meta(config)
    index = open_index(folder)
    fill(model, map_weights(model, index).sources, index, {})
    compute_buffers(model, {})
    return model


def _on_meta(stack: Stack) -> PreTrainedModel:
    config = open_model(stack.model, fetch_weights=False).config
    make = cast("Callable[..., PreTrainedModel]", AutoModelForCausalLM.from_config)
    with torch.device("meta"):
        return make(config, dtype=torch.bfloat16, experts_implementation="grouped_mm")


def _bytes(model: PreTrainedModel) -> int:
    return sum(each.numel() * each.element_size() for each in model.parameters())

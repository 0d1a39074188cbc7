"""Tensors of a checkpoint into the stock model by transformers' own loading code, some tensors at a time.

In: the stock model, mostly on meta, and tensors by their names in the checkpoint. Out: the same model with the
parameters that these tensors fill. So `ktc prove` reads the stock side without the rows of `weights.json`.
Refused: a tensor that transformers cannot convert, or that has another shape than its parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    convert_and_load_state_dict_in_model,  # pyright: ignore[reportUnknownVariableType]
    rename_source_key,  # pyright: ignore[reportUnknownVariableType]
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from ktc.model.hf.conversions import renamings_and_converters


def targets_of(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Return the tensor of the model's state dict that each tensor of a checkpoint fills, a part of it or whole.

    Names without a place in the model are left out.
    """
    state: dict[str, Any] = model.state_dict()
    renamings, converters = renamings_and_converters(model)
    targets: dict[str, str] = {}
    for name in names:
        target, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state and name in state:  # a renaming for the names of other files
            target = name
        if target in state:
            targets[name] = target
    return targets


def load_tensors(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Fill the parameters of `model` from `tensors`, in the dtypes of the parameters. Return the faults.

    `tensors` may hold slices of safetensors files, which are read one by one.
    """
    settings = LoadStateDictConfig(
        device_map={"": "cpu"}, weight_mapping=cast("Any", get_model_conversion_mapping(model))
    )
    load = cast("Any", convert_and_load_state_dict_in_model)
    older = {"tp_plan": None} if "tp_plan" in inspect.signature(load).parameters else {}  # a parameter up to 5.2x
    with no_progress_bars():
        info, _ = load(model=model, state_dict=dict(tensors), load_config=settings, **older)
    wrong = [f"`{name}` is {list(stored)}, expected {list(wanted)}" for name, stored, wanted in info.mismatched_keys]
    wrong += [f"`{name}`: {str(error).strip().splitlines()[-1]}" for name, error in info.conversion_errors.items()]
    return tuple(sorted(wrong))


@contextmanager
def no_progress_bars() -> Generator[None]:
    """Let transformers show no progress bars inside the context."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()

"""The precision of an adapter for inference: the one in which it was trained.

PEFT loads adapters of bf16 models in fp32, and trainers run them under autocast: matrices are multiplied in bf16, and
everything else stays in fp32. In: a model with an adapter. Out: the same, with factors of LoRA in the model's dtype,
which gives the same numbers, and layers of DoRA, KaSA and other kinds under autocast. A model of fp32 stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import torch

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn

_FACTORS: Final = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
_IN_FP32: Final = ("lora_magnitude_vector", "lora_diag")  # of DoRA and KaSA
_CONTEXTS: Final = "_ktc_autocast"


def cast_as_trained(attached: PeftModel, kind: str) -> None:
    """Give the layers of an adapter of a `kind` the precision of its training.

    Factors of LoRA that are merged before the sum is rounded stay in fp32, as they were merged in training.
    """
    dtype = cast("torch.dtype", cast("Any", attached).dtype)
    if dtype == torch.float32:
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in cast("Iterable[nn.Module]", attached.modules()):
        if not isinstance(layer, BaseTunerLayer):
            continue
        if kind == "LORA" and not any(getattr(layer, name, None) for name in _IN_FP32):
            _cast_factors(layer, dtype)
        elif not hasattr(layer, _CONTEXTS):
            vars(layer)[_CONTEXTS] = []
            layer.register_forward_pre_hook(partial(_enter, dtype))
            layer.register_forward_hook(_leave, always_call=True)


def _cast_factors(adapted: nn.Module, dtype: torch.dtype) -> None:
    from torch import nn

    from ktc.model.experts.module import FusedMoe
    from ktc.model.linears.trained_linear import TrainedLinear

    layer: Any = cast("Any", adapted).get_base_layer()
    if isinstance(layer, FusedMoe) and layer.weights.training.merged:
        return
    if isinstance(layer, TrainedLinear) and layer.weight_training.merged:
        return
    for name in _FACTORS:
        if isinstance(factors := getattr(adapted, name, None), nn.ModuleDict | nn.ParameterDict):
            factors.to(dtype)


def casts_alone(hook: object) -> bool:
    """Return whether a hook of a module is one of these layers, which is the same in each call."""
    return hook is _leave or (isinstance(hook, partial) and hook.func is _enter)


def _enter(dtype: torch.dtype, layer: nn.Module, args: object) -> None:
    context: Any = torch.autocast(next(layer.parameters()).device.type, dtype)
    context.__enter__()
    vars(layer)[_CONTEXTS].append(context)


def _leave(layer: nn.Module, args: object, output: object) -> None:
    vars(layer)[_CONTEXTS].pop().__exit__(None, None, None)

"""The warning (L470) of a training whose base weights train beside packed ones, which stay frozen.

In: a model with an adapter. `requires_grad_()` of a compiled model warns itself; of PEFT's wrapper, an inner module or
a layer it is stock code, which reaches parameters alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from peft import PeftModel
from torch import nn

from ktc.model.experts.trained.frozen_weights import tell_of_frozen
from ktc.model.loading.compiled_model import packed_parameters

_OF_PEFT: Final = (".modules_to_save.", ".token_adapter.")  # copies that PEFT trains in place of base weights


def warn_of_frozen(model: PeftModel) -> None:
    """Warn where a base weight of a layer trains, and packed weights of that layer do not."""
    base = model.get_base_model()
    adapter = str(getattr(model.base_model, "prefix", "lora_"))
    if any(_trains(layer, adapter) and packed_parameters(layer) for layer in _layers(base)):
        packed = packed_parameters(base)
        tell_of_frozen(len(packed), sum(packed), base)


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    return (layer for module in model.modules() if isinstance(module, nn.ModuleList) for layer in module)


def _trains(layer: nn.Module, adapter: str) -> bool:
    """Return whether a weight trains that is not an adapter's."""
    of_peft = (adapter, *_OF_PEFT)
    return any(
        parameter.requires_grad and not any(part in f".{name}" for part in of_peft)
        for name, parameter in layer.named_parameters()
    )

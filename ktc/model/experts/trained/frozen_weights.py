"""The warning (L470) that `requires_grad_()` does not reach weights that are packed for kernels."""

from __future__ import annotations

import logging
import weakref
from typing import Final

from torch import nn

from ktc.diagnostics import Diagnostic, render

log = logging.getLogger(__name__)


_told_models: Final[weakref.WeakSet[nn.Module]] = weakref.WeakSet()
_told_sizes: Final[set[int]] = set()  # of single modules: a model has as many of a size as layers


def tell_of_frozen(modules: int, parameters: int, model: nn.Module | None = None) -> None:
    """Warn that packed weights stay frozen: once for a model, and without one once for a module's size."""
    if (parameters in _told_sizes) if model is None else (model in _told_models):
        return
    if model is None:
        _told_sizes.add(parameters)
    else:
        _told_models.add(model)
    message = f"`requires_grad_` has no effect on {parameters:,} packed weights in {modules} modules: they stay frozen"
    hint = "adapt them: `get_peft_model(model, package.lora_config())` of `moe-experts-lora`; see `ktc explain L470`"
    log.warning("%s", render([Diagnostic("L470", message, hint=hint, severity="warning")]))


def forget_told() -> None:
    """Warn of all models again."""
    _told_models.clear()
    _told_sizes.clear()

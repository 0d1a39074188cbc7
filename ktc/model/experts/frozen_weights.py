"""The warning (L470) that `requires_grad_()` does not reach weights that are packed for kernels."""

from __future__ import annotations

import functools
import logging

from ktc.diagnostics import Diagnostic, render

log = logging.getLogger(__name__)


@functools.cache
def tell_of_frozen(modules: int, parameters: int) -> None:
    """Warn that packed weights stay frozen. Once per process and model."""
    message = f"`requires_grad_` has no effect on {parameters:,} packed weights in {modules} modules: they stay frozen"
    hint = "adapt them: `get_peft_model(model, package.lora_config())` of `moe-experts-lora`; see `ktc explain L470`"
    log.warning("%s", render([Diagnostic("L470", message, hint=hint, severity="warning")]))

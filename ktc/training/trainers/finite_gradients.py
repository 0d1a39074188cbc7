"""Gradients that are numbers: otherwise the step is not taken, and the run ends with its checkpoints whole.

Clipping multiplies all gradients by a factor of their common norm. After one NaN, of one expert, the whole adapter
would be NaN, and so would each checkpoint after it, while older ones are removed.
In: the trained parameters, after the last backward of a step. Refused (T548): a gradient that is infinite or NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from ktc.diagnostics import Diagnostic, KtcError
from ktc.model.experts.trained.peft_wrapper import ExpertsParamWrapper
from ktc.training.trainers.checkpoints import last_kept
from ktc.training.trainers.gradient_norm import total_norm


def require_finite(
    model: nn.Module, parameters: Sequence[nn.Parameter], step: int, run: Path, *, as_written: bool = False
) -> tuple[Tensor, float] | None:
    """Check the gradients of a step, and return their norm and its value, None without any.

    One norm is read for all of them: the host waits for the backward. They are `as_written` by it, or may have
    changed since.

    Raises:
        KtcError: T548, with the first parameter whose gradient is not finite, and its expert.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return None
    norm = total_norm(gradients, as_written=as_written)
    value = float(norm)
    if math.isfinite(value):
        return norm, value
    gradient = next((gradient for gradient in gradients if not bool(gradient.isfinite().all())), None)
    if gradient is None:  # their squares are too large for a sum
        return norm, value
    name = next((name for name, parameter in model.named_parameters() if parameter.grad is gradient), "")
    place = _expert(model, name, gradient)
    kind = "NaN" if bool(gradient.isnan().any()) else "infinite"
    message = f"step {step}: the gradient of `{name}`{place} is {kind}; the step was not taken, {last_kept(run)}"
    hint = "read the rows of this step, or start again with a lower learning rate"
    raise KtcError(Diagnostic("T548", message, hint=hint))


def _expert(model: nn.Module, name: str, gradient: Tensor) -> str:
    """Return the routed expert whose factor has the first such value, in words; "" for another parameter."""
    parent, _, side = name.rpartition(".lora_")
    wrapper = model.get_submodule(parent) if parent else None
    if not isinstance(wrapper, ExpertsParamWrapper):
        return ""
    row, column = cast("list[int]", torch.nonzero(~gradient.isfinite())[0].tolist())
    return f", of expert {wrapper.expert_of('A' if side.startswith('A') else 'B', gradient.shape[0], row, column)},"

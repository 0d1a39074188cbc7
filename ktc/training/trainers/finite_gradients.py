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
from ktc.model.kernels.sent_values import SentValues
from ktc.training.trainers.checkpoints import last_kept
from ktc.training.trainers.gradient_norm import total_norm


class GradientCheck:
    """The gradients of a step, at least one, and their `norm`, which `send` sends to the host.

    They are `as_written` by backward, or may have changed since. `step` is the number of the step.
    """

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], step: int, run: Path, *, as_written: bool = False
    ) -> None:
        self._model, self._step, self._run = model, step, run
        self._pairs = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        self.norm = total_norm([gradient for _, gradient in self._pairs], as_written=as_written)
        self._sent: SentValues | None = None

    def send(self, spoilt: Tensor | None = None) -> None:
        """Send the norm to the host, and whether a gradient is `spoilt`, which its device may know."""
        unknown = self.norm.isnan() if spoilt is None else spoilt
        self._sent = SentValues(torch.stack([self.norm, unknown.to(self.norm)]))

    def read(self) -> float:
        """Return the norm. One is read for all gradients: the host waits for the backward.

        It is not finite where their squares are too large for a sum.

        Raises:
            KtcError: T548, with the first parameter whose gradient is not finite, and its expert.
        """
        if self._sent is None:
            self.send()
        assert self._sent is not None
        value, spoilt = cast("list[float]", self._sent.read())
        if math.isfinite(value) and not spoilt:
            return value
        pair = next((pair for pair in self._pairs if not bool(pair[1].isfinite().all())), None)
        if pair is not None or spoilt:
            raise self._refusal(*pair or (None, None))
        return value

    def _refusal(self, parameter: nn.Parameter | None, gradient: Tensor | None) -> KtcError:
        told = "a gradient was not finite, and is not in memory any more"
        if gradient is not None:
            name = next((name for name, other in self._model.named_parameters() if other is parameter), "")
            kind = "NaN" if bool(gradient.isnan().any()) else "infinite"
            told = f"the gradient of `{name}`{_expert(self._model, name, gradient)} is {kind}"
        message = f"step {self._step}: {told}; the step was not taken, {last_kept(self._run)}"
        hint = "read the rows of this step, or start again with a lower learning rate"
        return KtcError(Diagnostic("T548", message, hint=hint))


def _expert(model: nn.Module, name: str, gradient: Tensor) -> str:
    """Return the routed expert whose factor has the first such value, in words; "" for another parameter."""
    parent, _, side = name.rpartition(".lora_")
    wrapper = model.get_submodule(parent) if parent else None
    if not isinstance(wrapper, ExpertsParamWrapper):
        return ""
    row, column = cast("list[int]", torch.nonzero(~gradient.isfinite())[0].tolist())
    return f", of expert {wrapper.expert_of('A' if side.startswith('A') else 'B', gradient.shape[0], row, column)},"

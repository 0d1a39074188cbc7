"""The norm of all gradients together, with every thread of the CPU.

In: gradients on any devices. Out: their norm on the first one's device. torch computes the norm of one tensor in host
memory with one thread, 160 ms for 315 million values; norms of its rows are computed by all threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Final, cast

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ktc.foundation.temporary_values import context_value
from ktc.model.experts.weight_training import State, state_of

_LARGE: Final = 1 << 16  # values
ReadNorm = tuple[Tensor, State]  # a norm, with the state of the gradients that it was read of
_known: Final[ContextVar[ReadNorm | None]] = ContextVar("_known", default=None)


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all values, a scalar; infinite or NaN if one of them is."""
    return get_total_norm([_with_same_norm(gradient) for gradient in gradients])


def read_norm(norm: Tensor, parameters: Iterable[Tensor]) -> ReadNorm:
    """Return a norm with the state of the gradients that it was read of; they must outlive it."""
    return norm, state_of(parameter.grad for parameter in parameters if parameter.grad is not None)


def known(norm: ReadNorm | None) -> AbstractContextManager[ReadNorm | None]:
    """Let `clip` take this norm inside the context, for the same gradients as they were; None: it computes the norm."""
    return context_value(_known, norm)


def clip(parameters: Tensor | Iterable[Tensor], most: float) -> Tensor:
    """Scale the gradients of parameters in place so that their norm is `most` at most; return what it was."""
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    norm, state = _known.get() or (None, ())
    if norm is None or state != state_of(gradients):
        norm = total_norm(gradients)
    clip_grads_with_norm_(trained, most, norm)
    return norm


def _with_same_norm(gradient: Tensor) -> Tensor:
    if gradient.device.type != "cpu" or gradient.ndim < 2 or gradient.numel() < _LARGE:
        return gradient
    return cast("Tensor", torch.linalg.vector_norm(gradient, dim=-1))

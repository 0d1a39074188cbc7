"""The norm of all gradients together, with every thread of the CPU.

In: gradients on any devices. Out: their norm on the first one's device. torch computes the norm of one tensor in host
memory with one thread, 160 ms for 315 million values; norms of its rows are computed by all threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ktc.foundation.temporary_values import context_value
from ktc.model.experts.trained.host_factors import norm_of
from ktc.model.experts.trained.weight_training import State, state_of

_LARGE: Final = 1 << 16  # values
_MARGIN: Final = 1e-5  # of a norm, whose factor is rounded


@dataclass(frozen=True, slots=True)
class KnownNorm:
    """A norm, its value on the host, and the state of the gradients that it is of.

    One that is not read has no value. Its device knows whether a gradient is `spoilt`, which is not finite.
    """

    norm: Tensor
    value: float | None
    state: State
    spoilt: Tensor | None = None


_known: Final[ContextVar[KnownNorm | None]] = ContextVar("_known", default=None)


def total_norm(gradients: Sequence[Tensor], *, as_written: bool = False) -> Tensor:
    """Return the 2-norm of all values, a scalar; infinite or NaN if one of them is.

    Gradients in host memory may be `as_written` by a backward on a GPU, which knows their norms.
    """
    known = [norm_of(gradient) if as_written else None for gradient in gradients]
    return get_total_norm(
        [_with_same_norm(gradient) if norm is None else norm for gradient, norm in zip(gradients, known, strict=True)]
    )


def known_norm(
    norm: Tensor, value: float | None, parameters: Iterable[Tensor], spoilt: Tensor | None = None
) -> KnownNorm:
    """Return a norm, read or not, with the state of the gradients that it is of; they must outlive it."""
    state = state_of(parameter.grad for parameter in parameters if parameter.grad is not None)
    return KnownNorm(norm, value, state, spoilt)


def known(norm: KnownNorm | None) -> AbstractContextManager[KnownNorm | None]:
    """Let `clip` take this norm inside the context, for the same gradients as they were; None: it computes the norm."""
    return context_value(_known, norm)


def clip(parameters: Tensor | Iterable[Tensor], most: float) -> Tensor:
    """Scale the gradients of parameters in place so that their norm is `most` at most; return what it was.

    Gradients of a smaller norm would be multiplied by 1, for which those in host memory are read and written.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    given = _known.get()
    if given is not None and given.state == state_of(gradients):
        norm = given.norm
        if given.value is not None and given.value + _MARGIN <= most * (1 - _MARGIN):
            return norm
        if given.spoilt is not None and most < math.inf:
            # zero gives the factor 1: the place of that gradient is still to be found
            clip_grads_with_norm_(trained, most, torch.where(given.spoilt, 0.0, norm))
            return norm
    else:
        norm = total_norm(gradients)
    if most == math.inf:  # a trainer that logs a norm and clips nothing; infinity by an infinite norm is NaN
        return norm
    clip_grads_with_norm_(trained, most, norm)
    return norm


def _with_same_norm(gradient: Tensor) -> Tensor:
    if gradient.device.type != "cpu" or gradient.ndim < 2 or gradient.numel() < _LARGE:
        return gradient
    return cast("Tensor", torch.linalg.vector_norm(gradient, dim=-1))

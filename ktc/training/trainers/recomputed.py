"""A function of tensors whose forward keeps its inputs alone: backward computes it again.

In: a function and its arguments. Out: its results, differentiable. `torch.utils.checkpoint` does the same by hooks on
each saved tensor and comparisons of both computations, which cost Python more than a compiled part of a layer does.
Both draw the same random numbers, and backward leaves the generators as they are.
Gradients of parameters are added to them inside backward: `torch.autograd.grad` does not see them, and a hook on a
parameter is called for each function that uses it.
Refused: nothing; at least one of the arguments has to require a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ktc.training.trainers.random_state import RandomState

Span = Callable[[], AbstractContextManager[None]]


def recomputed(
    function: Callable[..., Any], *arguments: Any, as_in_backward: bool, span: Span = nullcontext,
    state: RandomState | None = None,
) -> Any:  # fmt: skip
    """Return `function(*arguments)`, a tensor or a tuple of tensors.

    With `as_in_backward` forward builds a graph too, and drops it: code that is compiled for both is compiled once.
    Forward and backward each enter a `span`. `state` is the present one of the random numbers, where it is known.
    """
    with span():
        return cast("Any", _Recomputed.apply(function, as_in_backward, span, state, *arguments))


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Any], as_in_backward: bool, span: Span, state: RandomState | None,
        *arguments: Any,
    ) -> Any:  # fmt: skip
        devices = (argument.device for argument in arguments if isinstance(argument, Tensor))
        ctx.state = state or RandomState.now(next(devices, torch.device("cpu")))
        with torch.set_grad_enabled(as_in_backward):
            results = function(*_leaves(arguments) if as_in_backward else arguments)
        tensors = [argument if isinstance(argument, Tensor) else None for argument in arguments]
        ctx.function, ctx.as_in_backward, ctx.span = function, as_in_backward, span
        ctx.others = [None if isinstance(argument, Tensor) else argument for argument in arguments]
        ctx.save_for_backward(*tensors)
        if isinstance(results, Tensor):
            return results.detach()
        detached = tuple(result.detach() for result in cast("tuple[Tensor, ...]", results))
        ctx.mark_non_differentiable(*(result for result in detached if not result.is_floating_point()))
        return detached

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        arguments = _leaves(
            other if tensor is None else tensor for tensor, other in zip(ctx.saved_tensors, ctx.others, strict=True)
        )
        with cast("Span", ctx.span)():
            with torch.enable_grad(), cast("RandomState", ctx.state).again():
                results = ctx.function(*arguments)
            results = (results,) if isinstance(results, Tensor) else results
            pairs = [
                (result, grad)
                for result, grad in zip(results, grads, strict=True)
                if grad is not None and result.requires_grad
            ]
            if pairs:
                torch.autograd.backward([result for result, _ in pairs], [grad for _, grad in pairs])
        gradients = [argument.grad if isinstance(argument, Tensor) else None for argument in arguments]
        return None, None, None, None, *gradients


def _leaves(arguments: Any) -> list[Any]:
    """Return the arguments with tensors detached from their graph."""
    return [
        argument.detach().requires_grad_(argument.requires_grad) if isinstance(argument, Tensor) else argument
        for argument in arguments
    ]

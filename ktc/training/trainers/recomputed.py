"""A function of tensors whose forward keeps its inputs alone, and backward computes it again, or with room its graph.

In: a function and its arguments. Out: its results, differentiable. `torch.utils.checkpoint` does the same by hooks on
each saved tensor and comparisons of both computations, which cost Python more than a compiled part of a layer does.
Both draw the same random numbers, and backward leaves the generators as they are. A function whose graph is kept is
the same node of autograd, so that code which is compiled for one is compiled for both; its backward runs once.
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
    state: RandomState | None = None, keeps_graph: bool = False,
) -> Any:  # fmt: skip
    """Return `function(*arguments)`, a tensor or a tuple of tensors.

    With `as_in_backward` forward builds a graph too, and drops it: code that is compiled for both is compiled once.
    With `keeps_graph` it does not drop it. Forward and backward each enter a `span`. `state` is the present one of the
    random numbers, where it is known.
    """
    with span():
        return cast("Any", _Recomputed.apply(function, as_in_backward, keeps_graph, span, state, *arguments))


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Any], as_in_backward: bool, keeps_graph: bool, span: Span,
        state: RandomState | None, *arguments: Any,
    ) -> Any:  # fmt: skip
        ctx.kept, ctx.is_done, ctx.span = None, False, span
        if keeps_graph:
            arguments = tuple(_leaves(arguments))
        else:
            _save(ctx, function, state, arguments)
        with torch.set_grad_enabled(as_in_backward or keeps_graph):
            results = function(*_leaves(arguments) if as_in_backward and not keeps_graph else arguments)
        if keeps_graph:
            ctx.kept = arguments, results
        if isinstance(results, Tensor):
            return results.detach()
        detached = tuple(result.detach() for result in cast("tuple[Tensor, ...]", results))
        ctx.mark_non_differentiable(*(result for result in detached if not result.is_floating_point()))
        return detached

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        with cast("Span", ctx.span)():
            if ctx.is_done:
                raise RuntimeError("a graph that was kept cannot be used for backward a second time: it is freed")
            arguments, results = ctx.kept or _computed_again(ctx)
            ctx.is_done, ctx.kept = ctx.kept is not None, None
            results = (results,) if isinstance(results, Tensor) else results
            pairs = [
                (result, grad)
                for result, grad in zip(results, grads, strict=True)
                if grad is not None and result.requires_grad
            ]
            if pairs:
                torch.autograd.backward([result for result, _ in pairs], [grad for _, grad in pairs])
        gradients = [argument.grad if isinstance(argument, Tensor) else None for argument in arguments]
        return None, None, None, None, None, *gradients


def _save(ctx: Any, function: Callable[..., Any], state: RandomState | None, arguments: Any) -> None:
    devices = (argument.device for argument in arguments if isinstance(argument, Tensor))
    ctx.state, ctx.function = state or RandomState.now(next(devices, torch.device("cpu"))), function
    ctx.others = [None if isinstance(argument, Tensor) else argument for argument in arguments]
    ctx.save_for_backward(*(argument if isinstance(argument, Tensor) else None for argument in arguments))


def _computed_again(ctx: Any) -> tuple[list[Any], Any]:
    """Return leaves for the arguments, and the results with their graph."""
    saved = zip(ctx.saved_tensors, ctx.others, strict=True)
    arguments = _leaves(other if tensor is None else tensor for tensor, other in saved)
    with torch.enable_grad(), cast("RandomState", ctx.state).again():
        return arguments, ctx.function(*arguments)


def _leaves(arguments: Any) -> list[Any]:
    """Return the arguments with tensors detached from their graph."""
    return [
        argument.detach().requires_grad_(argument.requires_grad) if isinstance(argument, Tensor) else argument
        for argument in arguments
    ]

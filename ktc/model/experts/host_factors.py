"""Factors of LoRA in page-locked host memory, of experts that a GPU multiplies.

In: a layer's factors as views of parameters, and gradients on the GPU. Out: the parameters, and their gradients in
page-locked memory. No values stay on the GPU from forward to backward, and the host does not wait for a layer's
gradients: it waits at the end of the backward pass. A hook on such a parameter is not called.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ktc.model.experts.lora import ExpertsLora, Lora
from ktc.model.experts.private_api import at_end_of_backward

Parameters = tuple[Tensor | None, ...]


def parameters_on_host(lora: ExpertsLora) -> Parameters | None:
    """Return the parameter that each of a layer's four factors is a view of, None for a product without LoRA.

    None for all of them together unless each is a trained leaf in page-locked memory: factors that were joined or
    converted have values of their own.
    """
    found: list[Tensor | None] = []
    for product in lora.products:
        found += (None, None) if product is None else (_parameter(product, side) for side in (product.a, product.b))
    wanted = [factor for factor in lora.factors if factor is not None]
    return tuple(found) if wanted and len(wanted) == sum(leaf is not None for leaf in found) else None


def _parameter(lora: Lora, factor: Tensor) -> Tensor | None:
    if factor.device.type != "cpu" or not factor.is_pinned():
        return None
    memory = factor.untyped_storage().data_ptr()
    views = (leaf for leaf in lora.parameters if leaf.untyped_storage().data_ptr() == memory)
    return next((leaf for leaf in views if leaf.is_leaf and leaf.requires_grad), None)


def add_gradients(parameters: Sequence[Tensor | None], factors: Sequence[Tensor | None], gradients: Parameters) -> None:
    """Add the gradients of `factors`, on a device, to those of their `parameters` in host memory.

    Only backward may call this: values are complete at its end. A later gradient is added on the device, which is sent
    the earlier ones for that.
    """
    for parameter, factor, gradient in zip(parameters, factors, gradients, strict=True):
        if parameter is None or factor is None or gradient is None:
            continue
        total = _gradient_of(parameter)
        before = parameter.grad is not None
        parameter.grad = total
        same = total.as_strided(factor.shape, factor.stride(), factor.storage_offset() - parameter.storage_offset())
        if gradient.device.type != "cuda":
            same.copy_(same + gradient if before else gradient)
            continue
        stream = _stream(gradient.device)
        stream.wait_stream(torch.cuda.current_stream(gradient.device))
        with torch.cuda.stream(stream):
            added = gradient + same.to(gradient.device, non_blocking=True) if before else gradient
            same.copy_(added, non_blocking=True)
        gradient.record_stream(stream)
        at_end_of_backward(stream.synchronize)


def _gradient_of(parameter: Tensor) -> Tensor:
    """Return the parameter's gradient in page-locked memory, if that can be had; without values where it has none."""
    if parameter.grad is not None:
        return (
            parameter.grad if parameter.grad.is_pinned() or not parameter.is_pinned() else parameter.grad.pin_memory()
        )
    return torch.empty_strided(
        parameter.shape, parameter.stride(), dtype=parameter.dtype, pin_memory=parameter.is_pinned()
    )


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of these copies: another direction of the bus than that of weights."""
    return torch.cuda.Stream(device)

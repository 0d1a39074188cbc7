"""`ManyRows`: a frozen linear layer's product with many rows on the CPU, differentiable by its input.

In: CPU tensors of the kernel's dtype, weights (outputs, inputs) without gradients. Out: F.linear's result and the
gradient of the input, each value summed in fp32 and rounded once. It replaces F.linear for the calls that `serves`
accepts: not for few rows, small layers, trained weights, or where a measurement found F.linear faster (`auto`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ktc.model.kernels.kernel_library import KERNEL_LOCK, Engine, Kernel, NativeLinear
from ktc.model.kernels.step_context import StepContext
from ktc.model.linears.choice import Choice, kept_choice, measured_choice
from ktc.model.linears.gemv import DTYPES, is_plain, is_traced, linear_arguments

Product = Literal["packed", "auto"]
# Below, packing the weights takes longer than the product (docs/details/kernels.md).
FEWEST_ROWS: Final = 9
FEWEST_WEIGHTS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class ManyRows:
    """A kernel, the most threads it may use, and whether it takes every call or those that it is faster in."""

    kernel: Kernel
    threads: int
    product: Product

    def serves(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Return whether the kernel takes this call. Under autocast, the dtype is that of autocast."""
        if x.numel() < FEWEST_ROWS * weight.shape[1] or x.shape[-1:] != weight.shape[1:]:
            return False
        if weight.numel() < FEWEST_WEIGHTS or not weight.is_contiguous() or is_traced():
            return False
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        frozen = [weight] if bias is None else [weight, bias]
        if dtype != DTYPES[self.kernel.dtype] or any(tensor.dtype != dtype for tensor in frozen):
            return False
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in frozen):
            return False
        if not all(tensor.device.type == "cpu" and is_plain(tensor) for tensor in (x, *frozen)):
            return False
        return self.product == "packed" or self.choice().packed

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, context: StepContext | None = None) -> Tensor:
        """Multiply x (..., inputs) to (..., outputs), for a call that `serves` accepts."""
        x = x.to(weight.dtype)
        if not torch.is_grad_enabled():  # also in a step that is recorded: it has no operations of autograd
            return self.multiply(x, weight, bias, context)
        return cast("Tensor", _Frozen.apply(x, weight, bias, self))

    def choice(self) -> Choice:
        """Return the measured speeds of this process. The first call measures."""
        return _choice(self, torch.get_num_threads())

    def description(self) -> str:
        """Describe the choice, for a report."""
        return str(self.choice()) if self.product == "auto" else "packed, as the rules request"

    def multiply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, context: StepContext | None = None,
        *, transposed: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return x (..., inputs) W^T + b, or with `transposed` x (..., outputs) W, without gradients."""
        (outputs, inputs), x = weight.shape, x.detach().contiguous()
        out = x.new_empty((*x.shape[:-1], inputs if transposed else outputs))
        native, engine = cast("tuple[NativeLinear, Engine]", self.kernel.opened(self.threads))
        bias = None if bias is None else bias.detach().contiguous()  # held until the kernel has read it
        arguments = functools.partial(linear_arguments, transposed=transposed)
        with KERNEL_LOCK:
            native.multiply(engine, arguments(x, weight, bias, out))
        if context is not None:
            context.record_call(native.multiply_call, engine, arguments, (x, weight, bias), out)
        return out


@functools.cache
def _choice(product: ManyRows, torch_threads: int) -> Choice:  # one for all layers with the same threads
    of = f"{product.kernel.library.digest} {product.kernel.entry} {product.threads} {torch_threads}"
    return kept_choice(of, lambda: measured_choice(product.multiply))


class _Frozen(torch.autograd.Function):
    """The product has no cast of its own, so autocast changes nothing in here, nor when backward runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: ManyRows) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.product = product
        return product.multiply(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (weight,) = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        return ctx.product.multiply(grad, weight, transposed=True), None, None, None

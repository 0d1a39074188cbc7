"""`Gemv`: a linear layer's product with few rows, by a kernel that reads the weights as PyTorch stores them.

In: CPU tensors of the kernel's dtype, weights (outputs, inputs). Out: F.linear's result, rounded once. It is not
differentiable. It replaces F.linear for the calls that `serves` accepts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ktc.model.kernels.kernel_library import KERNEL_LOCK, Arguments, Kernel
from ktc.model.kernels.step_context import StepContext

DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# The fewest and most rows for which it was faster than F.linear (docs/details/kernels.md). For one fp32 row F.linear
# reads at the speed of memory. So it does for one fp16 row where the CPU has conversions beyond AVX2.
ROWS: Final[Mapping[str, tuple[int, int]]] = {"bf16": (1, 8), "fp16": (2, 8), "fp32": (2, 8)}
_BYTES_PER_THREAD: Final = 128 << 10  # with less, waking a thread costs more than it saves


@dataclass(frozen=True, slots=True)
class Gemv:
    """A kernel, and the most threads it may use."""

    kernel: Kernel
    threads: int

    def serves(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Return whether the kernel takes this call: few rows, under `no_grad`, plain CPU tensors of its dtype."""
        dtype, (fewest, most) = DTYPES[self.kernel.dtype], ROWS[self.kernel.dtype]
        if not fewest * weight.shape[1] <= x.numel() <= most * weight.shape[1] or x.shape[-1:] != weight.shape[1:]:
            return False
        if torch.is_grad_enabled():
            return False
        tensors = [tensor for tensor in (x, weight, bias) if tensor is not None]
        plain = all(t.dtype == dtype and t.device.type == "cpu" and is_plain(t) for t in tensors)
        return plain and weight.is_contiguous() and not is_traced() and not torch.is_autocast_enabled("cpu")

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, context: StepContext | None = None) -> Tensor:
        """Multiply x (..., inputs) to (..., outputs), for a call that `serves` accepts."""
        x = x.detach().contiguous()
        out = x.new_empty((*x.shape[:-1], weight.shape[0]))
        native, engine = self.kernel.opened(threads_for(weight.nbytes, self.threads))
        bias = None if bias is None else bias.detach().contiguous()  # held until the kernel has read it
        with KERNEL_LOCK:
            native.forward(engine, linear_arguments(x, weight, bias, out))
        if context is not None:
            context.record_call(native.call, engine, linear_arguments, (x, weight, bias), out)
        return out


def threads_for(nbytes: int, threads: int) -> int:
    """Return how many of `threads` a call takes that reads `nbytes`."""
    return min(threads, max(1, nbytes // _BYTES_PER_THREAD))


def linear_arguments(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, transposed: bool = False
) -> Arguments:
    """Return the fields of `LinearArguments`: x (..., inputs), weight (outputs, inputs), out (..., outputs)."""
    outputs, inputs = weight.shape
    return {
        "x": x.data_ptr(), "weight": weight.data_ptr(), "bias": address(bias), "out": out.data_ptr(),
        "rows": math.prod(x.shape[:-1]), "inputs": inputs, "outputs": outputs, "transposed": transposed,
    }  # fmt: skip


def address(tensor: Tensor | None) -> int:
    """Return where a tensor's values are, 0 without one."""
    return 0 if tensor is None else tensor.data_ptr()


def is_plain(tensor: Tensor) -> bool:
    """Return whether the tensor is not of a subclass, which may have other values than its memory."""
    return type(tensor) in (Tensor, torch.nn.Parameter)


def is_traced() -> bool:
    """Return whether the call is traced. The trace sees F.linear."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]

"""`Gemv`: a linear layer's product with few rows, by a kernel that reads the weights as PyTorch stores them.

In: CPU tensors of the kernel's dtype, weights (outputs, inputs). Out: F.linear's result, rounded once. It is not
differentiable. It replaces F.linear for the calls that `serves` accepts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ktc.model.kernels.kernel_calls import HostCall, announce
from ktc.model.kernels.kernel_library import TURNS, Engine, Kernel, NativeLinear, permitted_threads

DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# The fewest and most rows for which it was faster than F.linear (docs/kernels.md). For one fp32 row F.linear reads at
# the speed of memory. So it does for one fp16 row where the CPU has conversions beyond AVX2.
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

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply x (..., inputs) to (..., outputs), for a call that `serves` accepts."""
        outputs, inputs = weight.shape
        x = x.detach().contiguous()
        out = x.new_empty((*x.shape[:-1], outputs))
        native, engine = opened(self.kernel, self._threads(weight))
        bias = None if bias is None else bias.detach().contiguous()  # held until the kernel has read it
        sizes = math.prod(x.shape[:-1]), inputs, outputs
        with TURNS:
            native.forward(engine, x.data_ptr(), weight.data_ptr(), address(bias), out.data_ptr(), *sizes)

        def bind(reads: tuple[Tensor | None, ...], out: Tensor) -> HostCall:
            x_at, weight_at, bias_at = map(address, reads)
            return HostCall(native.call(engine, x_at, weight_at, bias_at, out.data_ptr(), *sizes), (*reads, out))

        announce(bind, (x, weight, bias), out)
        return out

    def _threads(self, weight: Tensor) -> int:
        return min(self.threads, max(1, weight.numel() * weight.element_size() // _BYTES_PER_THREAD))


@functools.cache
def opened(kernel: Kernel, threads: int) -> tuple[NativeLinear, Engine]:
    """Return a kernel, and the engine of its calls with at most this number of threads."""
    return kernel.linear(), kernel.engine(permitted_threads(threads))


def address(tensor: Tensor | None) -> int:
    """Return where a tensor's values are, 0 without one."""
    return 0 if tensor is None else tensor.data_ptr()


def is_plain(tensor: Tensor) -> bool:
    """Return whether the tensor is not of a subclass, which may have other values than its memory."""
    return type(tensor) in (Tensor, torch.nn.Parameter)


def is_traced() -> bool:
    """Return whether the call is traced. The trace sees F.linear."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]

"""The test of every built linear kernel against the product in fp64, before its first use.

In: one kernel and its spec. Refused (H225): a kernel whose output differs by more than the rounding of its dtype, or by
one bit between one thread and three, or between a row alone and among others.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ktc.model.kernels.kernel_library import Kernel
from ktc.model.kernels.linear_spec import LinearSpec
from ktc.model.linears.gemv import DTYPES, linear_arguments
from ktc.stages.codegen.wrong_kernel import relative_error, wrong_output

# Relative Frobenius error; a dtype's own rounding is 2e-3, 3e-4 and 3e-8.
TOLERANCE: Final = {"bf16": 3e-3, "fp16": 1e-3, "fp32": 1e-6}
_SHAPES: Final = ((37, 70), (64, 96), (1, 5))  # outputs, inputs
_ROWS: Final = (1, 3, 8)


def self_test_linear(kernel: Kernel, spec: LinearSpec) -> None:
    """Raise `KtcError` (H225) if the kernel does not compute x W^T + b."""
    generator = torch.Generator().manual_seed(21)
    for outputs, inputs in _SHAPES:
        sizes = ((max(_ROWS), inputs), (outputs, inputs), (outputs,))
        x, weight, bias = (torch.randn(size, generator=generator).to(DTYPES[spec.dtype]) for size in sizes)
        expected: Tensor = x.double() @ weight.double().T + bias.double()
        whole = _product(kernel, x, weight, bias)
        error = relative_error(whole, expected)
        if not error <= TOLERANCE[spec.dtype]:
            raise wrong_output(
                spec, f"differs from the reference by {error:.1e}, allowed are {TOLERANCE[spec.dtype]:.0e}"
            )
        for rows in _ROWS:
            if not torch.equal(_product(kernel, x[:rows], weight, bias, threads=3), whole[:rows]):
                raise wrong_output(spec, f"has other bits for {rows} rows with three threads")


def _product(kernel: Kernel, x: Tensor, weight: Tensor, bias: Tensor, threads: int = 1) -> Tensor:
    out = x.new_empty((x.shape[0], weight.shape[0]))
    kernel.native().forward(kernel.engine(threads), linear_arguments(x, weight, bias, out))
    return out

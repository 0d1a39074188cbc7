"""The test of every built linear kernel against the product in fp64, before its first use.

In: one kernel and its spec. Refused (H225): a kernel whose output differs by more than the rounding of its dtype, or by
one bit between one thread and three, or between a row alone and among others.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ktc.diagnostics import Diagnostic, KtcError
from ktc.model.kernels.kernel_library import Kernel
from ktc.model.kernels.linear_spec import LinearSpec
from ktc.model.linears.gemv import DTYPES

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
        error = norm(whole.double() - expected) / norm(expected)
        if not error <= TOLERANCE[spec.dtype]:
            raise _wrong(spec, f"differs from the reference by {error:.1e}, allowed are {TOLERANCE[spec.dtype]:.0e}")
        for rows in _ROWS:
            if not torch.equal(_product(kernel, x[:rows], weight, bias, threads=3), whole[:rows]):
                raise _wrong(spec, f"has other bits for {rows} rows with three threads")


def _product(kernel: Kernel, x: Tensor, weight: Tensor, bias: Tensor, threads: int = 1) -> Tensor:
    out = x.new_empty((x.shape[0], weight.shape[0]))
    x_at, weight_at, bias_at, out_at = (tensor.data_ptr() for tensor in (x, weight, bias, out))
    (outputs, inputs), rows = weight.shape, x.shape[0]
    kernel.linear().forward(kernel.engine(threads), x_at, weight_at, bias_at, out_at, rows, inputs, outputs)
    return out


def norm(tensor: Tensor) -> float:
    return float(tensor.square().sum().sqrt())


def _wrong(spec: LinearSpec, what: str) -> KtcError:
    message = f"the built kernel `{spec.entry}` is wrong: its output {what}"
    return KtcError(Diagnostic("H225", message, hint="try another compiler with `CXX`"))

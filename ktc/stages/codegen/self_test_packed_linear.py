"""The test of every built packed linear kernel against its own weights in fp64, before its first use.

In: one kernel and its spec. Refused (H225): a kernel that unpacks other weights than the format's reference, whose
output differs by more than the rounding of bf16, or by one bit between one thread and three.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ktc.diagnostics import Diagnostic, KtcError
from ktc.foundation.formats import BLOCKS
from ktc.model.experts.block_reference import dequantise_blocks, random_blocks
from ktc.model.experts.packed import huge_pages
from ktc.model.kernels.kernel_library import Kernel
from ktc.model.kernels.linear_spec import PackedLinearSpec

_TOLERANCE: Final = 4e-3  # relative Frobenius error; bf16's own rounding of weights and outputs is 3e-3
_SHAPES: Final = ((37, 1), (64, 2))  # outputs, and inputs in blocks
_ROWS: Final = (1, 3, 40)


def self_test_packed_linear(kernel: Kernel, spec: PackedLinearSpec) -> None:
    """Raise `KtcError` (H225) if the kernel does not compute x W^T + b."""
    generator = torch.Generator().manual_seed(21)
    native = kernel.packed_linear()
    for outputs, num_blocks in _SHAPES:
        inputs = num_blocks * max(32, BLOCKS[spec.weight_format].weights)
        blocks = random_blocks(outputs, inputs, spec.weight_format, 0.05, generator)
        packed = huge_pages(native.packed_bytes(inputs, outputs))
        native.pack(packed.data_ptr(), blocks.data_ptr(), outputs, blocks.shape[1])
        weight = torch.empty(outputs, inputs, dtype=torch.bfloat16)
        native.unpack(packed.data_ptr(), weight.data_ptr(), inputs, outputs)
        if not torch.equal(weight, dequantise_blocks(blocks, spec.weight_format).bfloat16()):
            raise _wrong(spec, "has other weights than the blocks")
        x, bias = (torch.randn(size, generator=generator).bfloat16() for size in ((max(_ROWS), inputs), (outputs,)))
        expected = x.double() @ weight.double().T + bias.double()
        for rows in _ROWS:
            found = _product(kernel, x[:rows], packed, bias)
            error = _norm(found.double() - expected[:rows]) / _norm(expected[:rows])
            if not error <= _TOLERANCE:
                raise _wrong(spec, f"differs from the reference by {error:.1e}, allowed are {_TOLERANCE:.0e}")
            if not torch.equal(_product(kernel, x[:rows], packed, bias, threads=3), found):
                raise _wrong(spec, f"has other bits for {rows} rows with three threads")


def _product(kernel: Kernel, x: Tensor, packed: Tensor, bias: Tensor, threads: int = 1) -> Tensor:
    out = x.new_empty((x.shape[0], bias.shape[0]))
    x_at, packed_at, bias_at, out_at = (tensor.data_ptr() for tensor in (x, packed, bias, out))
    (rows, inputs), outputs = x.shape, bias.shape[0]
    kernel.packed_linear().forward(kernel.engine(threads), x_at, packed_at, bias_at, out_at, rows, inputs, outputs)
    return out


def _norm(tensor: Tensor) -> float:
    return float(tensor.square().sum().sqrt())


def _wrong(spec: PackedLinearSpec, what: str) -> KtcError:
    message = f"the built kernel `{spec.entry}` is wrong: its output {what}"
    return KtcError(Diagnostic("H225", message, hint="try another compiler with `CXX`"))

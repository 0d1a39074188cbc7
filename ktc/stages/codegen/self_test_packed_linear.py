"""The test of every built packed linear kernel against its own weights in fp64, before its first use.

In: one kernel and its spec. Refused (H225): a kernel that unpacks other weights than the format's reference, whose
output differs by more than the rounding of bf16, or by one bit between one thread and three.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ktc.foundation.formats import BLOCKS
from ktc.model.experts.layouts.packed import huge_pages
from ktc.model.experts.references.block_reference import dequantise_blocks, random_blocks
from ktc.model.kernels.kernel_library import Kernel, NativePackedLinear
from ktc.model.kernels.linear_spec import PackedLinearSpec
from ktc.model.linears.stored_linear import packed_arguments
from ktc.stages.codegen.wrong_kernel import relative_error, wrong_output

_TOLERANCE: Final = 4e-3  # relative Frobenius error; bf16's own rounding of weights and outputs is 3e-3
_SHAPES: Final = ((37, 1), (64, 2))  # outputs, and inputs in blocks
_ROWS: Final = (1, 3, 40)


def self_test_packed_linear(kernel: Kernel, spec: PackedLinearSpec) -> None:
    """Raise `KtcError` (H225) if the kernel does not compute x W^T + b."""
    generator = torch.Generator().manual_seed(21)
    native: NativePackedLinear = kernel.native()
    for outputs, num_blocks in _SHAPES:
        inputs = num_blocks * max(32, BLOCKS[spec.weight_format].weights)
        blocks = random_blocks(outputs, inputs, spec.weight_format, 0.05, generator)
        packed = huge_pages(native.packed_bytes(inputs, outputs))
        native.pack(packed.data_ptr(), blocks.data_ptr(), outputs, blocks.shape[1])
        weight = torch.empty(outputs, inputs, dtype=torch.bfloat16)
        native.unpack(packed.data_ptr(), weight.data_ptr(), inputs, outputs)
        if not torch.equal(weight, dequantise_blocks(blocks, spec.weight_format).bfloat16()):
            raise wrong_output(spec, "has other weights than the blocks")
        x, bias = (torch.randn(size, generator=generator).bfloat16() for size in ((max(_ROWS), inputs), (outputs,)))
        expected = x.double() @ weight.double().T + bias.double()
        for rows in _ROWS:
            output = _product(kernel, x[:rows], packed, bias)
            error = relative_error(output, expected[:rows])
            if not error <= _TOLERANCE:
                raise wrong_output(spec, f"differs from the reference by {error:.1e}, allowed are {_TOLERANCE:.0e}")
            if not torch.equal(_product(kernel, x[:rows], packed, bias, threads=3), output):
                raise wrong_output(spec, f"has other bits for {rows} rows with three threads")


def _product(kernel: Kernel, x: Tensor, packed: Tensor, bias: Tensor, threads: int = 1) -> Tensor:
    out = x.new_empty((x.shape[0], bias.shape[0]))
    kernel.native().forward(kernel.engine(threads), packed_arguments(x, packed, bias, out))
    return out

"""`Int8DecodeAttention`: attention of few new tokens over int8 codes of keys and values, by a kernel.

In: queries, and a cache of `Int8Tensor`s. Out: attention's output, rounded once. Codes are not decoded: products are
sums of integers (`int8_attention.hpp`). The kernel also makes the codes of new keys and values, bit for bit those of
`quantise`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktc.model.attention.decode import DecodeAttention, view
from ktc.model.attention.int8_tensor import Int8Tensor
from ktc.model.attention.paged_tensor import memory_of
from ktc.model.attention.split_decode import Decode, SplitDecode
from ktc.model.kernels.kernel_library import Kernel, NativeInt8Attention
from ktc.model.linears.gemv import DTYPES, is_traced


class Int8DecodeAttention(DecodeAttention):
    """A kernel over codes, and the most threads it may use."""

    def _reads(self, tensor: Tensor) -> bool:
        if not isinstance(tensor, Int8Tensor) or tensor.device.type != "cpu":
            return False
        return memory_of(tensor.codes).stride(-1) == 1


def decoder(kernel: Kernel | None, threads: int, kv: str, *, split: bool) -> Decode | None:
    """Return the decode attention over a cache of `kv`: `int8` codes, or numbers of the model's dtype.

    Without a kernel of the CPU it is that of a GPU where `split`, otherwise there is none.
    """
    if kernel is None:
        return SplitDecode() if split else None
    return Int8DecodeAttention(kernel, threads) if kv == "int8" else DecodeAttention(kernel, threads)


def quantised(kernel: Kernel, numbers: Tensor) -> Int8Tensor:
    """Return the codes of numbers (B, K, T, d) by the kernel, which takes CPU tensors of its dtype."""
    if numbers.dtype != DTYPES[kernel.dtype] or numbers.device.type != "cpu" or is_traced():
        return Int8Tensor.of(numbers)
    numbers = numbers.detach()
    numbers = numbers if numbers.stride(-1) == 1 else numbers.contiguous()
    B, K, T, width = numbers.shape
    codes = torch.empty((B, K, T, width), dtype=torch.int8)
    scales = torch.empty((B, K, T, 1), dtype=torch.float32)
    made = Int8Tensor(codes, scales, numbers.dtype)
    native: NativeInt8Attention = kernel.opened(1)[0]
    batch, head, token, _ = numbers.stride()
    native.quantise({
        "rows": numbers.data_ptr(), "batch_stride": batch, "head_stride": head, "token_stride": token,
        "codes": view(made), "batch": B, "heads": K, "tokens": T,
    })  # fmt: skip
    return made

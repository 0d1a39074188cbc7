"""`Int8DecodeAttention`: attention of few new tokens over int8 codes of keys and values, by a kernel.

In: queries, and a cache of `Int8Tensor`s. Out: attention's output, rounded once. Codes are not decoded: products are
sums of integers (`int8_attention.hpp`). The kernel also makes the codes of new keys and values, bit for bit those of
`quantise`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ktc.model.attention.decode import DecodeAttention, Heads, is_seen_mask, table_of, threads_for, view
from ktc.model.attention.int8_tensor import Int8Tensor
from ktc.model.attention.paged_tensor import memory_of
from ktc.model.kernels.kernel_library import Engine, Kernel, NativeInt8Attention, permitted_threads
from ktc.model.linears.gemv import DTYPES, is_plain, is_traced


class Int8DecodeAttention(DecodeAttention):
    """A kernel over codes, and the most threads it may use."""

    def serves(self, query: Tensor, heads: Heads, mask: Tensor | None) -> bool:
        """Return whether the kernel takes this call: few tokens, under `no_grad`, on the CPU, over codes alone."""
        if not self._is_few(query) or not is_seen_mask(mask):
            return False
        dtype = DTYPES[self.kernel.dtype]
        held = [each for each in heads if each is not None]
        if not (query.dtype == dtype and query.device.type == "cpu" and is_plain(query)):
            return False
        return len(set(map(table_of, held))) == 1 and all(
            isinstance(each, Int8Tensor) and each.device.type == "cpu" and memory_of(each.codes).stride(-1) == 1
            for each in held
        )

    def _opened(self, nbytes: int) -> tuple[NativeInt8Attention, Engine]:
        return _opened(self.kernel, threads_for(nbytes, self.threads))


def decoder(kernel: Kernel, threads: int, kv: str) -> DecodeAttention:
    """Return the decode attention of a kernel over a cache of `kv`: `int8` codes, or numbers of the model's dtype."""
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
    native, _ = _opened(kernel, 1)
    strides = numbers.stride(0), numbers.stride(1), numbers.stride(2)
    native.quantise(numbers.data_ptr(), strides, view(made), (B, K, T))
    return made


@functools.cache
def _opened(kernel: Kernel, threads: int) -> tuple[NativeInt8Attention, Engine]:
    """Return a kernel, and the engine of its calls with at most this number of threads."""
    return kernel.int8_attention(), kernel.engine(permitted_threads(threads))

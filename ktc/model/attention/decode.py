"""`DecodeAttention`: attention of few new tokens over a cache in host memory, by a kernel.

In: queries and what the cache holds, of the kernel's dtype. Out: attention's output, rounded once. It is not
differentiable, and takes the calls that `serves` accepts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ktc.model.attention.chosen import Chosen
from ktc.model.attention.int8_tensor import Int8Tensor
from ktc.model.attention.paged_tensor import PagedTensor, PageTable, memory_of
from ktc.model.kernels.kernel_calls import HostCall, announce
from ktc.model.kernels.kernel_library import (
    TURNS,
    Engine,
    Kernel,
    NativeAttention,
    NativeCacheView,
    NativePages,
    permitted_threads,
)
from ktc.model.linears.gemv import DTYPES, address, is_plain, is_traced

MOST_TOKENS: Final = 16  # of a call: with more, products of all rows at once are faster
_BYTES_PER_THREAD: Final = 128 << 10  # with less, waking a thread costs more than it saves
_NOTHING: Final = (0, 0, 0, 0, 0, 0, 0, 0, 0)
_ALL: Final = (0, 0, 1, 1)  # positions, and no lists of them


class Heads(NamedTuple):
    """A cache: keys (B, K, L, k) and values (B, K, L, v); of latent attention rotary keys (B, K, L, r) beside."""

    keys: Tensor
    values: Tensor
    more_keys: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """A kernel, and the most threads it may use."""

    kernel: Kernel
    threads: int

    def serves(self, query: Tensor, heads: Heads, mask: Tensor | None) -> bool:
        """Return whether the kernel takes this call: few tokens, under `no_grad`, plain CPU tensors of its dtype."""
        if not self._is_few(query) or not is_seen_mask(mask):
            return False
        held = [each for each in heads if each is not None]
        tensors = [query, *map(memory_of, held)]
        dtype = DTYPES[self.kernel.dtype]
        if not all(t.dtype == dtype and t.device.type == "cpu" and is_plain(t) for t in tensors):
            return False
        return len(set(map(table_of, held))) == 1 and all(each.stride(-1) == 1 for each in tensors[1:])

    def __call__(
        self, query: Tensor, heads: Heads, *, scale: float, mask: Tensor | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Compute query (B, H, T, k + r) -> (B, T, H, v). Without a `mask` new tokens are the last positions.

        `mask` is bool, (B or 1, 1, T, L); `sinks` (H,) are further scores without a value.
        """
        B, H, T, _ = query.shape
        positions, key_heads = heads.keys.shape[2], heads.keys.shape[1]
        out = query.new_empty((B, T, H, heads.values.shape[-1]))
        seen = seen_by_kernel(mask, B, T, positions)
        sizes = B, key_heads, H // key_heads, T, positions
        nbytes = sum(each.nbytes for each in heads if each is not None)
        self._forward(query.detach().contiguous(), heads, seen, sinks, out, sizes, scale, _ALL, nbytes)
        return out

    def of_chosen(
        self, query: Tensor, heads: Heads, chosen: Chosen, *, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """Compute query (B, H, T, k + r) -> (B, T, H, v) over the chosen positions alone."""
        B, H, T, width = query.shape
        choosing, most = chosen.positions.shape[2:]
        rows = query.detach().transpose(1, 2).reshape(B * T, H, 1, width).contiguous()
        out = query.new_empty((B, T, H, heads.values.shape[-1]))
        sizes = B * T, choosing, H // choosing, 1, most
        lists = chosen.positions.data_ptr(), chosen.counts.data_ptr(), T, choosing // heads.keys.shape[1]
        row_bytes = sum(each.shape[-1] * each.itemsize for each in heads if each is not None)
        nbytes = chosen.positions.numel() * row_bytes
        self._forward(rows, heads, None, sinks, out, sizes, scale, lists, nbytes)
        return out

    def _is_few(self, query: Tensor) -> bool:
        plain = not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu") and not is_traced()
        return plain and query.shape[2] <= MOST_TOKENS

    def _opened(self, nbytes: int) -> tuple[NativeAttention, Engine]:
        return _opened(self.kernel, threads_for(nbytes, self.threads))

    def _forward(
        self, query: Tensor, heads: Heads, seen: Tensor | None, sinks: Tensor | None, out: Tensor,
        sizes: tuple[int, int, int, int, int], scale: float, chosen: tuple[int, int, int, int], nbytes: int,
    ) -> None:  # fmt: skip
        sink = None if sinks is None else sinks.detach().float().contiguous()
        native, engine = self._opened(nbytes)
        table = table_of(heads.keys)
        pages, lengths = (None, None) if table is None else (table.pages, table.lengths)
        held = [None if each is None else memory_of(each) for each in (heads.keys, heads.more_keys, heads.values)]
        element = 1 if isinstance(heads.keys, Int8Tensor) else query.element_size()

        def given(reads: tuple[Tensor | None, ...], out: Tensor) -> Any:
            query, keys, more_keys, values, seen, sink, pages, lengths = reads
            return (
                engine, element, _pages_view(pages, lengths, (keys, more_keys, values)), address(query), view(keys),
                view(more_keys), view(values), *mask_view(seen), address(sink), out.data_ptr(), sizes, scale, chosen,
            )  # fmt: skip

        reads = (query, *held, seen, sink, pages, lengths)
        with TURNS:
            native.forward(*given(reads, out))
        if chosen != _ALL:
            return

        def bind(reads: tuple[Tensor | None, ...], out: Tensor) -> HostCall:
            return HostCall(native.call(*given(reads, out)), (*reads, out))

        announce(bind, reads, out)


def threads_for(nbytes: int, threads: int) -> int:
    """Return how many of `threads` a call takes that reads `nbytes`."""
    return min(threads, max(1, nbytes // _BYTES_PER_THREAD))


def seen_by_kernel(mask: Tensor | None, batch: int, tokens: int, positions: int) -> Tensor | None:
    """Return a bool mask (B or 1, 1, T, L) as (B, T, L) whose positions are neighbours."""
    seen = None if mask is None else mask[:, 0, :, :positions].expand(batch, tokens, positions)
    return seen if seen is None or seen.stride(-1) == 1 else seen.contiguous()


def is_seen_mask(mask: Tensor | None) -> bool:
    """Return whether kernels take a mask: none, or a bool (B or 1, 1, T, L)."""
    return mask is None or (mask.dtype == torch.bool and mask.dim() == 4 and mask.shape[1] == 1)


def view(tensor: Tensor | None) -> NativeCacheView:
    """Return the address, the strides and the width of keys or values (B, K, L, k), those of scales, or zeros."""
    if tensor is None:
        return _NOTHING
    if not isinstance(tensor, Int8Tensor):
        return tensor.data_ptr(), *_strides(tensor), tensor.shape[-1], 0, 0, 0, 0
    held, scales = memory_of(tensor.codes), memory_of(tensor.scales)
    return held.data_ptr(), *_strides(held), held.shape[-1], scales.data_ptr(), *_strides(scales)


def _strides(held: Tensor) -> tuple[int, int, int]:
    return held.stride(0), held.stride(1), held.stride(2)


def table_of(tensor: Tensor) -> PageTable | None:
    """Return where the sequences of keys or values in pages are; None where they are not in pages."""
    held = tensor.codes if isinstance(tensor, Int8Tensor) else tensor
    return held.table if isinstance(held, PagedTensor) else None


def _pages_view(pages: Tensor | None, lengths: Tensor | None, held: Sequence[Tensor | None]) -> NativePages:
    """Return the address and the stride of a table of pages, the address of lengths, and how many pages there are."""
    if pages is None or lengths is None:
        return 0, 0, 0, 0, 0
    parts = [part for each in held if each is not None for part in _parts(each)]
    return pages.data_ptr(), pages.stride(0), lengths.data_ptr(), pages.shape[1], min(each.shape[0] for each in parts)


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    coded = isinstance(tensor, Int8Tensor)
    return (memory_of(tensor.codes), memory_of(tensor.scales)) if coded else (memory_of(tensor),)


def mask_view(seen: Tensor | None) -> tuple[int, int, int]:
    """Return the address and the strides of a mask (B, T, L), or zeros."""
    return (0, 0, 0) if seen is None else (seen.data_ptr(), seen.stride(0), seen.stride(1))


@functools.cache
def _opened(kernel: Kernel, threads: int) -> tuple[NativeAttention, Engine]:
    """Return a kernel, and the engine of its calls with at most this number of threads."""
    return kernel.attention(), kernel.engine(permitted_threads(threads))

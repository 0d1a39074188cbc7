"""`DecodeAttention`: attention of few new tokens over a cache in host memory, by a kernel.

In: queries and what the cache holds, of the kernel's dtype. Out: attention's output, rounded once. It is not
differentiable, and takes the calls that `serves` accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from ktc.model.attention.int8_tensor import Int8Tensor
from ktc.model.attention.paged_tensor import PagedTensor, PageTable, memory_of
from ktc.model.kernels.kernel_library import KERNEL_LOCK, Arguments, Kernel
from ktc.model.kernels.step_context import StepContext
from ktc.model.linears.gemv import DTYPES, is_plain, is_traced, threads_for

MOST_TOKENS: Final = 16  # of a call: with more, products of all rows at once are faster


@dataclass(frozen=True, slots=True)
class Chosen:
    """Ascending `positions` (B, T, S, M) in int32, of which the first `counts` (B, T, S) are chosen, contiguous both.

    S is the number of query heads, or of key heads where the query heads of one share a choice.
    """

    positions: Tensor
    counts: Tensor


class KVCacheView(NamedTuple):
    """Keys (B, K, L, k) and values (B, K, L, v) of a cache. Latent attention has rotary keys (B, K, L, r) too."""

    keys: Tensor
    values: Tensor
    rope_keys: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the cache has."""
        return [tensor for tensor in self if tensor is not None]


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """A kernel, and the most threads it may use."""

    kernel: Kernel
    threads: int

    def serves(self, query: Tensor, kv: KVCacheView, mask: Tensor | None) -> bool:
        """Return whether the kernel takes this call: few tokens, under `no_grad`, plain CPU tensors of its dtype."""
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or is_traced():
            return False
        if query.shape[2] > MOST_TOKENS or not is_seen_mask(mask) or not self._is_plain(query):
            return False
        return len(set(map(table_of, kv.tensors))) == 1 and all(map(self._reads, kv.tensors))

    def _reads(self, tensor: Tensor) -> bool:
        """Return whether the kernel reads a tensor of the cache."""
        memory = memory_of(tensor)
        return self._is_plain(memory) and memory.stride(-1) == 1

    def _is_plain(self, tensor: Tensor) -> bool:
        return tensor.dtype == DTYPES[self.kernel.dtype] and tensor.device.type == "cpu" and is_plain(tensor)

    def __call__(
        self, query: Tensor, kv: KVCacheView, *, scale: float, mask: Tensor | None = None,
        sinks: Tensor | None = None, context: StepContext | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute query (B, H, T, k + r) -> (B, T, H, v). Without a `mask` new tokens are the last positions.

        `mask` is bool, (B or 1, 1, T, L); `sinks` (H,) are further scores without a value.
        """
        B, H, T, _ = query.shape
        K, L = kv.keys.shape[1:3]
        out = query.new_empty((B, T, H, kv.values.shape[-1]))
        sizes = {"batch": B, "key_heads": K, "group": H // K, "tokens": T, "positions": L, "scale": scale}
        seen = seen_by_kernel(mask, B, T, L)
        nbytes = sum(tensor.nbytes for tensor in kv.tensors)
        call = self._forward(query.detach().contiguous(), kv, seen, sinks, out, sizes, nbytes)
        if context is not None:
            context.record_call(*call, out)
        return out

    def of_chosen(
        self, query: Tensor, kv: KVCacheView, chosen: Chosen, *, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """Compute query (B, H, T, k + r) -> (B, T, H, v) over the chosen positions alone."""
        B, H, T, width = query.shape
        selectors, most = chosen.positions.shape[2:]
        rows = query.detach().transpose(1, 2).reshape(B * T, H, 1, width).contiguous()
        out = query.new_empty((B, T, H, kv.values.shape[-1]))
        sizes = {
            "batch": B * T, "key_heads": selectors, "group": H // selectors, "tokens": 1, "positions": most,
            "scale": scale, "chosen": chosen.positions.data_ptr(), "counts": chosen.counts.data_ptr(), "sequences": T,
            "selectors_per_kv_head": selectors // kv.keys.shape[1],
        }  # fmt: skip
        nbytes = chosen.positions.numel() * sum(tensor.shape[-1] * tensor.itemsize for tensor in kv.tensors)
        self._forward(rows, kv, None, sinks, out, sizes, nbytes)
        return out

    def _forward(
        self, query: Tensor, kv: KVCacheView, seen: Tensor | None, sinks: Tensor | None, out: Tensor,
        sizes: Arguments, nbytes: int,
    ) -> tuple[Any, Any, Callable[..., Arguments], tuple[Tensor | None, ...]]:  # fmt: skip
        """Fill `out`. Return what a recorder needs: the call, its engine, its arguments by tensors, and the tensors."""
        sinks = None if sinks is None else sinks.detach().float().contiguous()
        native, engine = self.kernel.opened(threads_for(nbytes, self.threads))
        table = table_of(kv.keys)
        element_bytes = 1 if isinstance(kv.keys, Int8Tensor) else query.element_size()

        def arguments(*tensors: Any) -> Arguments:
            query, keys, values, rope_keys, seen, sinks, pages, lengths, out = tensors
            fields = sizes | {
                "query": query.data_ptr(), "keys": view(keys), "values": view(values), "out": out.data_ptr(),
                "element_bytes": element_bytes,
            }  # fmt: skip
            if rope_keys is not None:
                fields["rope_keys"] = view(rope_keys)
            if seen is not None:
                fields |= mask_view(seen)
            if sinks is not None:
                fields["sinks"] = sinks.data_ptr()
            if pages is not None:
                fields |= _pages_view(pages, lengths, (keys, values, rope_keys))
            return fields

        memories = (None if tensor is None else memory_of(tensor) for tensor in kv)
        of_table = (None, None) if table is None else (table.pages, table.lengths)
        reads = (query, *memories, seen, sinks, *of_table)
        with KERNEL_LOCK:
            native.forward(engine, arguments(*reads, out))
        return native.call, engine, arguments, reads


def decoders(model: nn.Module) -> Iterator[tuple[Any, DecodeAttention]]:
    """Yield the attention modules that have a kernel, with it."""
    for module in model.modules():
        decode = getattr(module, "decode", None)
        if isinstance(decode, DecodeAttention):
            yield module, decode


def paged_layers(model: nn.Module) -> dict[int, DecodeAttention]:
    """Return the kernel of every layer that may read its cache in pages on the CPU, by the layer's number.

    Whether a layer uses the kernel is known after a step (`copies` of `paged_tensor.py`). Sparse attention is left out:
    its index has positions of contiguous caches.
    """
    return {
        int(module.layer_idx): decode
        for module, decode in decoders(model)
        if module.sparse is None and all(parameter.device.type == "cpu" for parameter in module.parameters())
    }


def seen_by_kernel(mask: Tensor | None, batch: int, tokens: int, positions: int) -> Tensor | None:
    """Return a bool mask (B or 1, 1, T, L) as (B, T, L) whose positions are neighbours."""
    seen = None if mask is None else mask[:, 0, :, :positions].expand(batch, tokens, positions)
    return seen if seen is None or seen.stride(-1) == 1 else seen.contiguous()


def is_seen_mask(mask: Tensor | None) -> bool:
    """Return whether kernels take a mask: none, or a bool (B or 1, 1, T, L)."""
    return mask is None or (mask.dtype == torch.bool and mask.dim() == 4 and mask.shape[1] == 1)


def view(tensor: Tensor) -> Arguments:
    """Return the fields of `CacheView` for keys or values (B, K, L, k)."""
    if isinstance(tensor, Int8Tensor):
        scales = memory_of(tensor.scales)
        batch, head, position, _ = scales.stride()
        of_scales = {
            "scales": scales.data_ptr(), "scale_batch": batch, "scale_head": head, "scale_position": position
        }  # fmt: skip
        return view(memory_of(tensor.codes)) | of_scales
    batch, head, position, _ = tensor.stride()
    return {
        "data": tensor.data_ptr(), "batch": batch, "head": head, "position": position, "width": tensor.shape[-1]
    }  # fmt: skip


def table_of(tensor: Tensor) -> PageTable | None:
    """Return where the sequences of keys or values in pages are; None where they are not in pages."""
    memory = tensor.codes if isinstance(tensor, Int8Tensor) else tensor
    return memory.table if isinstance(memory, PagedTensor) else None


def _pages_view(pages: Tensor, lengths: Tensor, memories: Sequence[Tensor | None]) -> Arguments:
    """Return the fields of `AttentionArguments` for a cache in pages, whose sequences have `lengths`."""
    parts = [part for memory in memories if memory is not None for part in _parts(memory)]
    return {
        "lengths": lengths.data_ptr(), "pages": pages.data_ptr(), "pages_of_sequence": pages.stride(0),
        "most_pages": pages.shape[1], "num_pages": min(memory.shape[0] for memory in parts),
    }  # fmt: skip


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    coded = isinstance(tensor, Int8Tensor)
    return (memory_of(tensor.codes), memory_of(tensor.scales)) if coded else (memory_of(tensor),)


def mask_view(seen: Tensor) -> Arguments:
    """Return the fields of a mask (B, T, L)."""
    return {"mask": seen.data_ptr(), "mask_batch": seen.stride(0), "mask_token": seen.stride(1)}

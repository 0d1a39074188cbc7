"""`IndexKernel`: the native side of a `KeyIndex`. Its codes and choices are those of the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ktc.model.attention.decode import Chosen, KVCacheView, mask_view, seen_by_kernel, view
from ktc.model.attention.key_codes import signs
from ktc.model.attention.key_index import KeyIndex
from ktc.model.attention.sparsity import FORMATS, Sparsity
from ktc.model.kernels.kernel_library import KERNEL_LOCK, Arguments, Engine, Kernel, NativeSparseAttention
from ktc.model.linears.gemv import threads_for


@dataclass(frozen=True, slots=True)
class IndexKernel:
    """A kernel, and the most threads it may use."""

    kernel: Kernel
    threads: int

    def extend(self, index: KeyIndex, kv: KVCacheView, positions: int) -> None:
        """Add the keys from `covered` up to `positions`, as `KeyIndex.extend`."""
        index.reserve(positions)
        B, K, _, width = kv.keys.shape
        new = B * K * (positions - index.covered) * width * kv.keys.itemsize
        native, engine = self._opened(new)
        arguments: Arguments = {
            "keys": view(kv.keys), "index": _index(index), "batch": B, "key_heads": K, "begin": index.covered,
            "end": positions,
        }  # fmt: skip
        if kv.rope_keys is not None:
            arguments["rope_keys"] = view(kv.rope_keys)
        with KERNEL_LOCK:
            native.encode(engine, arguments)
        index.covered = positions

    def select(
        self, index: KeyIndex, query: Tensor, mask: Tensor | None, sparsity: Sparsity, scale: float
    ) -> Chosen:  # fmt: skip
        """Choose positions for query (B, H, T, k), of those that `mask` (B or 1, 1, T, L) shows."""
        B, H, T, _ = query.shape
        K, L = index.mean.shape[1], index.covered
        most = min(sparsity.budget, L)
        positions = torch.empty((B, T, K if sparsity.shared else H, most), dtype=torch.int32)
        counts = torch.empty(positions.shape[:3], dtype=torch.int32)
        query, seen = query.detach().contiguous(), seen_by_kernel(mask, B, T, L)
        nbytes = index.codes.blocks.nbytes + index.codes.scales.nbytes
        native, engine = self._opened(nbytes)
        arguments: Arguments = {
            "query": query.data_ptr(), "index": _index(index), "positions": positions.data_ptr(),
            "counts": counts.data_ptr(), "batch": B, "key_heads": K, "group": H // K, "tokens": T, "length": L,
            "most": most, "scale": scale, "k": sparsity.k, "sink": sparsity.sink, "local": sparsity.local,
            "shared": sparsity.shared, **({} if seen is None else mask_view(seen)),
        }  # fmt: skip
        with KERNEL_LOCK:
            native.select(engine, arguments)
        return Chosen(positions, counts)

    def _opened(self, nbytes: int) -> tuple[NativeSparseAttention, Engine]:
        return self.kernel.opened(threads_for(nbytes, self.threads))


def _index(index: KeyIndex) -> Arguments:
    """Return the fields of `IndexView`."""
    blocks, scales, width = index.codes.blocks, index.codes.scales, index.mean.shape[-1]
    return {
        "blocks": blocks.data_ptr(), "scales": scales.data_ptr(), "mean": index.mean.data_ptr(),
        "signs": signs(width).data_ptr(), "capacity": blocks.shape[2],
        "layout": {"format": FORMATS.index(index.format), "width": width},
    }  # fmt: skip

"""`IndexKernel`: the native side of a `KeyIndex`. Its codes and choices are those of the reference."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ktc.model.attention.chosen import Chosen
from ktc.model.attention.decode import Heads, mask_view, seen_by_kernel, threads_for, view
from ktc.model.attention.key_codes import signs
from ktc.model.attention.key_index import KeyIndex
from ktc.model.attention.sparsity import FORMATS, Sparsity
from ktc.model.kernels.kernel_library import TURNS, Engine, Kernel, NativeSparseAttention, permitted_threads


@dataclass(frozen=True, slots=True)
class IndexKernel:
    """A kernel, and the most threads it may use."""

    kernel: Kernel
    threads: int

    def extend(self, index: KeyIndex, heads: Heads, positions: int) -> None:
        """Add the keys from `covered` up to `positions`, as `KeyIndex.extend`."""
        index.reserve(positions)
        B, K, _, width = heads.keys.shape
        new = B * K * (positions - index.covered) * width * heads.keys.itemsize
        native, engine = _opened(self.kernel, threads_for(new, self.threads))
        with TURNS:
            native.encode(
                engine, view(heads.keys), view(heads.more_keys), _index(index), (B, K, index.covered, positions)
            )
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
        native, engine = _opened(self.kernel, threads_for(nbytes, self.threads))
        with TURNS:
            native.select(
                engine, query.data_ptr(), _index(index), *mask_view(seen), positions.data_ptr(), counts.data_ptr(),
                (B, K, H // K, T, L, most), scale, (sparsity.k, sparsity.sink, sparsity.local), sparsity.shared,
            )  # fmt: skip
        return Chosen(positions, counts)


def _index(index: KeyIndex) -> tuple[int, int, int, int, int, int, int]:
    blocks, scales = index.codes.blocks, index.codes.scales
    width = index.mean.shape[-1]
    addresses = (blocks.data_ptr(), scales.data_ptr(), index.mean.data_ptr(), signs(width).data_ptr())
    return (*addresses, blocks.shape[2], FORMATS.index(index.format), width)


@functools.cache
def _opened(kernel: Kernel, threads: int) -> tuple[NativeSparseAttention, Engine]:
    """Return a kernel, and the engine of its calls with at most this number of threads."""
    return kernel.sparse_attention(), kernel.engine(permitted_threads(threads))

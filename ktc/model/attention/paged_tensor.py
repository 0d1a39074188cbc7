"""`PagedTensor`: keys or values of several sequences in pages of one memory.

In: memory whose pages hold 128 positions each, and a table of the pages of every sequence. Out: a tensor that is,
for PyTorch, one of all sequences (B, heads, columns, d), aligned at their last position, with zeros before it. The
kernels of ktc read pages where they are. Any other operation reads a copy, and writing into one is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor

from ktc.model.experts.private_api import schema_of, tree_map_only, wrapper_tensor

PAGE: Final = 128  # positions, `kPagePositions` of the kernels

_SAME: Final = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})


@dataclass(frozen=True, slots=True, eq=False)
class PageTable:
    """`pages` int32 (B, most): those of every sequence in their order. `lengths` int64 (B,): their positions."""

    pages: Tensor
    lengths: Tensor


class _Watched(threading.local):
    copied: list[Tensor] | None = None


_WATCHED: Final = _Watched()


@contextmanager
def copies() -> Generator[list[Tensor]]:
    """Collect the memory of every tensor in pages that this thread copies."""
    before, _WATCHED.copied = _WATCHED.copied, []
    try:
        yield _WATCHED.copied
    finally:
        _WATCHED.copied = before


class PagedTensor(Tensor):
    """`memory` (pages, heads, PAGE, d), and the `table` of the pages of each sequence."""

    memory: Tensor
    table: PageTable

    @staticmethod
    def __new__(cls: type[PagedTensor], memory: Tensor, table: PageTable, columns: int) -> PagedTensor:
        """Make a tensor (B, heads, columns, d); no sequence is longer than `columns`."""
        _, heads, _, width = memory.shape
        shape = table.lengths.shape[0], heads, columns, width
        made: Any = wrapper_tensor(cls, shape, memory.dtype, memory.device)
        made.memory, made.table = memory, table
        return cast("PagedTensor", made)

    def __init__(self, memory: Tensor, table: PageTable, columns: int) -> None:
        """Everything is done by `__new__`."""

    def decoded(self) -> Tensor:
        """Return a copy (B, heads, columns, d)."""
        if _WATCHED.copied is not None:
            _WATCHED.copied.append(self.memory)
        columns = torch.arange(self.shape[2])
        positions = columns - (self.shape[2] - self.table.lengths[:, None])
        present, positions = positions >= 0, positions.clamp(min=0)
        pages = self.table.pages.long().gather(1, positions // PAGE)
        rows = self.memory[pages, :, positions % PAGE]  # (B, columns, heads, d)
        return torch.where(present[:, :, None, None], rows, 0).transpose(1, 2)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PagedTensor({tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute with copies."""
        if func in _SAME:
            return args[0]
        if schema_of(func).is_mutable and isinstance(args[0], PagedTensor):
            raise NotImplementedError(f"`{func}` would write into the pages of a cache")
        copied = tree_map_only(PagedTensor, PagedTensor.decoded, (tuple(args), dict(kwargs or {})))
        return func(*copied[0], **copied[1])


def memory_of(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor in pages, and any other tensor as it is."""
    return tensor.memory if isinstance(tensor, PagedTensor) else tensor

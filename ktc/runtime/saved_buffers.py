"""Memory for what forward keeps for backward, used again call after call.

First touch of fresh pages can cost more than the kernel that fills them: 69 MB of gate and up took 17 to 150 ms beside
470 ms of forward. An allocator gives blocks of that size back to the system; here a block returns to a list when
autograd drops its tensor, and the next call, of this layer or of another, takes it from there.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from typing import Final

import torch
from torch import Tensor

# Below it PyTorch's own allocator has blocks at hand, and pages to touch are few.
SMALLEST: Final = 1 << 20
_HUGE_PAGE: Final = 2 << 20


class SavedBuffers:
    """Blocks that were lent before and are free again. As many as were ever in use at once, no more."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._lock = threading.Lock()  # for who takes; to give back is one step of the interpreter

    @property
    def free_bytes(self) -> int:
        """How much is kept for later calls."""
        return sum(map(len, self._free))

    def take(self, size: int) -> Tensor:
        """Bytes of any content, whose memory comes back when the last tensor on it is gone."""
        if size < SMALLEST:
            return torch.empty(size, dtype=torch.uint8)
        with self._lock:
            block = self._fitting(size)
        block = block or _mapped(size)
        lent = memoryview(block)  # the tensor holds it, and it can be watched, which storage cannot
        weakref.finalize(lent, self._free.append, block).atexit = False
        return torch.frombuffer(lent, dtype=torch.uint8, count=size)

    def _fitting(self, size: int) -> mmap.mmap | None:
        """The smallest block that is large enough, but not twice as large. Blocks too small are given up."""
        fitting = [block for block in self._free if size <= len(block) <= 2 * size + _HUGE_PAGE]
        if not fitting:
            self._free[:] = [block for block in self._free if len(block) >= size]
            return None
        block = min(fitting, key=len)
        self._free.remove(block)
        return block


def _mapped(size: int) -> mmap.mmap:
    rounded = -(-size // _HUGE_PAGE) * _HUGE_PAGE
    block = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block

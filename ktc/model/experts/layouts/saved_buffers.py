"""Memory for the values that forward saves for backward, reused call after call.

First touch of fresh pages can cost more than the kernel that fills them: 69 MB of gate and up took 17 to 150 ms beside
470 ms of forward. An allocator gives blocks of that size back to the system; here a block returns to a list when
autograd drops its tensor, and the next call, of this layer or of another, takes it from there.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from typing import Final

import torch
from torch import Tensor

from ktc.foundation.anonymous_memory import HUGE_PAGE, anonymous

# PyTorch's own allocator keeps smaller blocks, and they have few pages to touch.
SMALLEST: Final = 1 << 20


class SavedBuffers:
    """Blocks that were lent before and are free again.

    Lent and free blocks together never exceed the most bytes that were lent at once. The largest request, rounded up to
    2 MB, bounds every lent block. So a training step takes at most what its widest batch takes, which a plan counts.
    Free blocks stay until the process ends, through evaluation too.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._held = self._most = 0  # bytes lent and free, and most that were lent at once
        self._renew()
        os.register_at_fork(after_in_child=self._renew)  # a thread of the parent may hold the lock

    def _renew(self) -> None:
        self._lock = threading.Lock()  # for `take`; to return a block is one step of the interpreter

    @property
    def free_bytes(self) -> int:
        """The bytes that are kept for later calls."""
        return sum(map(len, self._free))

    @property
    def held_bytes(self) -> int:
        """The bytes that are lent or kept."""
        return self._held

    def take(self, size: int) -> Tensor:
        """Return bytes of any content. Their memory is used again once the last tensor on it is freed."""
        if size < SMALLEST:
            return torch.empty(size, dtype=torch.uint8)
        with self._lock:
            block = self._fitting(size) or self._new(size)
            self._most = max(self._most, self._held - self.free_bytes)
            self._give_up()
        lent = memoryview(block)  # the tensor holds it, and it can be watched, which storage cannot
        weakref.finalize(lent, self._free.append, block).atexit = False
        return torch.frombuffer(lent, dtype=torch.uint8, count=size)

    def _fitting(self, size: int) -> mmap.mmap | None:
        """Take the smallest free block that is large enough, but not twice as large."""
        fitting = [block for block in self._free if size <= len(block) <= 2 * size + HUGE_PAGE]
        if not fitting:
            return None
        block = min(fitting, key=len)
        self._free.remove(block)
        return block

    def _new(self, size: int) -> mmap.mmap:
        block = anonymous(-(-size // HUGE_PAGE) * HUGE_PAGE, "what backward reads of experts")
        self._held += len(block)
        return block

    def _give_up(self) -> None:
        """Free blocks, the largest first, until the rest is no more than was lent at once."""
        while self._held > self._most and self._free:
            block = max(self._free, key=len)
            self._free.remove(block)
            self._held -= len(block)

"""Experts that are laid out, checked and packed on several threads, while the next ones are read.

In: functions, each of another expert. Out: their results in memory once `finish` returns. At most one per thread waits,
and no more than about 1 GiB, so that memory stays small. Most of their time is spent in the kernel's loops and in
PyTorch's operations, which release the interpreter and open no threads of their own here.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Final

import torch

from ktc.foundation import host
from ktc.model.kernels import openmp
from ktc.model.packed_store.stored_experts import Pack

_MOST_BYTES: Final = 1 << 30  # that wait, or one piece


class Packing:
    """Run functions on threads. Use it as a context manager."""

    def __init__(self) -> None:
        self._most = host.usable_threads()
        self._pool = ThreadPoolExecutor(self._most, "ktc-packing", openmp.on_one_thread)
        self._waiting = deque[tuple[Future[None], int]]()
        self._nbytes = 0  # of those that wait

    def __enter__(self) -> Packing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, pack: Pack, nbytes: int = 0) -> None:
        """Run a function on this many bytes soon, and raise what an earlier one raised, in their order."""
        while self._waiting and self._nbytes + nbytes > _MOST_BYTES:
            self._wait()
        self._waiting.append((self._pool.submit(_run, pack), nbytes))
        self._nbytes += nbytes
        if len(self._waiting) > self._most:
            self._wait()

    def finish(self) -> None:
        """Wait for all functions, and raise what the first one raised."""
        while self._waiting:
            self._wait()

    def _wait(self) -> None:
        packed, nbytes = self._waiting.popleft()
        self._nbytes -= nbytes
        packed.result()


def _run(pack: Pack) -> None:
    with torch.no_grad():  # of this thread
        pack()

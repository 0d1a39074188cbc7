"""Experts that are laid out, checked and packed on several threads, while the next ones are read.

In: functions, each of another expert. Out: their results in memory once `finish` returns. At most one per thread waits,
so that memory stays small. Most of their time is spent in the kernel's loops and in PyTorch's operations, which release
the interpreter and open no threads of their own here.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from ktc.foundation import host
from ktc.model.kernels import openmp
from ktc.model.packed_store.stored_experts import Pack


class Packing:
    """Run functions on threads. Use it as a context manager."""

    def __init__(self) -> None:
        self._most = host.usable_threads()
        self._pool = ThreadPoolExecutor(self._most, "ktc-packing", openmp.on_one_thread)
        self._waiting = deque[Future[None]]()

    def __enter__(self) -> Packing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, pack: Pack) -> None:
        """Run a function soon, and raise what an earlier one raised, in their order."""
        self._waiting.append(self._pool.submit(_run, pack))
        if len(self._waiting) > self._most:
            self._waiting.popleft().result()

    def finish(self) -> None:
        """Wait for all functions, and raise what the first one raised."""
        while self._waiting:
            self._waiting.popleft().result()


def _run(pack: Pack) -> None:
    with torch.no_grad():  # of this thread
        pack()

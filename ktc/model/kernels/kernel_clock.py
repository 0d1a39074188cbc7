"""Calls of the experts' kernels with their times, reported to listeners; without any, a call costs one comparison.

In: a kernel's call, from the module that makes it. Out: a `KernelCall` for the listener, which is called in the thread
that called the kernel; that may be one of autograd's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final, Literal

Pass = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One pass over one layer's experts: when it began (`time.perf_counter`), its seconds, and what it was given.

    `sizes` are the number of experts, hidden, intermediate and `top_k`; `ranks` those of LoRA on gate_up and on down,
    0 without.
    """

    kind: Pass
    began: float
    seconds: float
    tokens: int
    sizes: tuple[int, int, int, int]
    ranks: tuple[int, int]


Listener = Callable[[KernelCall], None]
_listeners: Final[list[Listener]] = []
_UNTIMED: Final = nullcontext()


@contextmanager
def listening(listener: Listener) -> Generator[None]:
    """While inside, `listener` hears of every call in this process."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def timed(
    kind: Pass, tokens: int, sizes: tuple[int, int, int, int], ranks: tuple[int, int]
) -> AbstractContextManager[None]:
    """Around a kernel's call, once the kernel is free."""
    return _told(kind, tokens, sizes, ranks) if _listeners else _UNTIMED


@contextmanager
def _told(kind: Pass, tokens: int, sizes: tuple[int, int, int, int], ranks: tuple[int, int]) -> Generator[None]:
    began = time.perf_counter()
    yield
    call = KernelCall(kind, began, time.perf_counter() - began, tokens, sizes, ranks)
    for listener in tuple(_listeners):
        listener(call)

"""Calls of the experts' kernels with their times, reported to listeners; without any, a call costs one comparison.

In: a kernel's call, from the module that makes it. Out: a `KernelCall` for the listeners of that layer, which are
called in the thread that called the kernel; that may be one of autograd's. A layer is known by the address of its
packed weights, which is all that a registered operator receives of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator
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
_listeners: Final[dict[int, list[Listener]]] = {}  # by the address of packed weights
_UNTIMED: Final = nullcontext()


@contextmanager
def listening(listener: Listener, layers: Collection[int]) -> Generator[None]:
    """Report every call of these layers inside the block to `listener`."""
    for layer in layers:
        _listeners.setdefault(layer, []).append(listener)
    try:
        yield
    finally:
        for layer in layers:
            _listeners[layer].remove(listener)
            if not _listeners[layer]:
                del _listeners[layer]


def timed(
    layer: int, kind: Pass, tokens: int, sizes: tuple[int, int, int, int], ranks: tuple[int, int]
) -> AbstractContextManager[None]:
    """Around a kernel's call, once the kernel is free."""
    heard = _listeners.get(layer) if _listeners else None
    return _UNTIMED if heard is None else _reported(tuple(heard), kind, tokens, sizes, ranks)


@contextmanager
def _reported(
    listeners: tuple[Listener, ...], kind: Pass, tokens: int, sizes: tuple[int, int, int, int], ranks: tuple[int, int]
) -> Generator[None]:
    began = time.perf_counter()
    yield
    call = KernelCall(kind, began, time.perf_counter() - began, tokens, sizes, ranks)
    for listener in listeners:
        listener(call)

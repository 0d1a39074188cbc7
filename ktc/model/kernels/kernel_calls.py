"""Calls of kernels as values: what a CUDA graph or the program of a decoding step calls again.

In: a kernel's call on tensors. Out: `HostCall`, a C function on what these tensors hold when it is called. While
`recorded` is entered, kernels of the CPU also hand each of their calls to a recorder, after they have computed it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from ktc.model.kernels.kernel_library import NativeHostCall


@dataclass(frozen=True, slots=True)
class HostCall:
    """A C function and its argument. `kept` is what the call reads and writes."""

    native: NativeHostCall
    kept: tuple[object, ...]

    @property
    def function(self) -> int:
        """The address of the function, which takes a pointer, throws nothing and calls nothing of CUDA."""
        return self.native.function

    @property
    def address(self) -> int:
        """The argument of the function."""
        return self.native.address

    def rethrow(self) -> None:
        """Raise what the first failed call since the last `rethrow` has thrown."""
        self.native.rethrow()


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A call that has been computed. `bind` makes one for other tensors in the places of `reads` and `out`."""

    bind: Callable[[tuple[Tensor | None, ...], Tensor], HostCall]
    reads: tuple[Tensor | None, ...]
    out: Tensor


class _Current(threading.local):
    record: Callable[[KernelCall], None] | None = None


_CURRENT: Final = _Current()


@contextmanager
def recorded(record: Callable[[KernelCall], None]) -> Generator[None]:
    """Give `record` every call of a kernel by this thread."""
    before, _CURRENT.record = _CURRENT.record, record
    try:
        yield
    finally:
        _CURRENT.record = before


def announce(
    bind: Callable[[tuple[Tensor | None, ...], Tensor], HostCall], reads: tuple[Tensor | None, ...], out: Tensor
) -> None:  # fmt: skip
    """Hand the recorder, if there is one, a call that read tensors and wrote `out`."""
    if _CURRENT.record is not None:
        _CURRENT.record(KernelCall(bind, reads, out))


def recording() -> bool:
    """Return whether this thread's calls are recorded."""
    return _CURRENT.record is not None

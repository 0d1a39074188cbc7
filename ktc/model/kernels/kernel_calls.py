"""Calls of kernels as values: what a CUDA graph or the program of a decoding step calls again.

In: a kernel's call on tensors. Out: `HostCall`, a C function on what these tensors hold when it is called.
`KernelCall` is what the recorder of a step receives (`StepContext`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ktc.model.kernels.kernel_library import Arguments, Engine, NativeHostCall


class HostWork(NamedTuple):
    """The time of a call's runs that computed something, the amount that they computed, and how many they are.

    The amount is in intermediate units for partial calls of experts, and one per run for others. `squares` are the sum
    of squared amounts, and `products` that of amounts times their time.
    """

    nanoseconds: int
    amount: int
    runs: int
    squares: float
    products: float


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

    def make(self) -> None:
        """Make the call on this thread. Its error waits for `rethrow`."""
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.function)(self.address)

    @property
    def work(self) -> HostWork:
        """The work of all calls so far that had something to compute."""
        return HostWork(*self.native.work)

    def rethrow(self, runs: int | None = None) -> None:
        """Raise what the first failed call since the last `rethrow` has thrown, of the first `runs` calls if given."""
        if runs is None:
            self.native.rethrow()
        else:
            self.native.rethrow(runs)


Bind = Callable[[tuple[Tensor | None, ...], Tensor], HostCall]  # of the tensors that a call reads, and its output


NativeCall = Callable[[Engine, Arguments], NativeHostCall]  # a kernel's method for a call that is made later


def bind_later(call: NativeCall, engine: Engine, arguments: Callable[..., Arguments]) -> Bind:
    """Return a function that makes host calls. `arguments` takes the tensors that a call reads, and its output."""

    def bind(reads: tuple[Tensor | None, ...], out: Tensor) -> HostCall:
        return HostCall(call(engine, arguments(*reads, out)), (arguments, *reads, out))

    return bind


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A call that has been computed. `bind` makes one for other tensors in the places of `reads` and `out`."""

    bind: Bind
    reads: tuple[Tensor | None, ...]
    out: Tensor

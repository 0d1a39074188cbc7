"""Launches of Triton kernels that cost a few microseconds of Python instead of 50 to 100.

In: a kernel of `triton.jit`, as a decorator above it. Out: a `CachedKernel`, called as before: `kernel[grid](...)`.
Triton binds the arguments of each launch by name, makes a text of their types and looks its compiled kernel up by that.
Here a tuple of what Triton compiles differently is the key, and the compiled kernel's own launcher gets addresses.
The first launch with each key is Triton's own. So is every launch under Triton's interpreter, where a hook of Triton
observes launches, and with arguments that have no key. Importing this needs Triton.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false
# Triton is not typed.

from __future__ import annotations

import functools
import logging
import marshal
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from enum import IntEnum
from typing import Any, Final, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

log = logging.getLogger(__name__)

_ALIGNMENT: Final = 16  # bytes of addresses, and what integers are divided by, for which Triton compiles other code
_INT32: Final = 1 << 31
_INT64: Final = 1 << 63
_PRIMITIVES: Final = 2  # the version of `marshal` in which equal values of one type have equal bytes


class Specialised(IntEnum):
    """What Triton compiles a parameter for, beside its type."""

    NOT = 0
    ONE = 1  # whether an integer is 1
    ALIGNED = 2  # that, and whether integers and addresses are multiples of 16


class Arguments(NamedTuple):
    """The arguments of a launch: what Triton compiles them for, what the launcher gets, and their device."""

    key: tuple[Any, ...]
    values: list[Any]
    device: int


class _Launch(NamedTuple):
    """A compiled kernel. `rest` are the values of the parameters behind the positional arguments."""

    run: Callable[..., Any]
    function: Any
    metadata: Any
    rest: tuple[Any, ...]


class CachedKernel:
    """A Triton kernel that is launched on the device of its first tensor, which is made the current one.

    Positional arguments are those that are not constants. All constants and options of the launch have names.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._launches: dict[tuple[Any, ...], _Launch] = {}
        self._specialised = specialised_of(kernel)
        functools.update_wrapper(self, kernel, updated=())

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.kernel[grid](*args, **constants)
        given = None if is_observed(self.kernel) else arguments_of(args, self._specialised)
        named = None if given is None else constants_key(constants)
        if given is None or named is None:
            return self._by_triton(grid, args, constants)
        if given.device != torch.cuda.current_device():
            with torch.cuda.device(given.device):
                return self._launch(grid, *args, **constants)
        key = (given.device, named, *given.key)
        launch = self._launches.get(key)
        if launch is None:
            compiled = self._by_triton(grid, args, constants)
            self._record(key, compiled, args, constants)
            return compiled
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(given.device)
        nothing = None  # the metadata and both hooks of the launch
        launch.run(
            x, y, z, stream, launch.function, launch.metadata, nothing, nothing, nothing, *given.values, *launch.rest
        )
        return None

    def _by_triton(self, grid: tuple[int, ...], args: Sequence[Any], constants: Mapping[str, Any]) -> Any:
        first = next((arg for arg in args if isinstance(arg, Tensor)), None)
        with nullcontext() if first is None else torch.cuda.device_of(first):
            return self.kernel[grid](*args, **constants)

    def _record(self, key: tuple[Any, ...], compiled: Any, args: Sequence[Any], constants: Mapping[str, Any]) -> None:
        """Keep what Triton compiled for a key. Parameters behind the positional ones must be constants."""
        behind = self.kernel.params[len(args) :]
        try:
            rest = tuple(constants.get(param.name, param.default) for param in behind)
            launch = _Launch(compiled.run, compiled.function, compiled.packed_metadata, rest)
        except AttributeError as lacking:
            _tell_once(str(lacking))
            return
        if all(param.is_constexpr for param in behind):
            self._launches[key] = launch


def specialised_of(kernel: Any) -> tuple[Specialised, ...] | None:
    """Return what the parameters are compiled for, up to the first constant; None for a kernel without a key."""
    if not isinstance(kernel, JITFunction):
        return None  # as the interpreter's
    specialised = list["Specialised"]()
    for param in kernel.params:
        if param.is_constexpr:
            break
        if param.annotation_type:
            return None
        aligned = Specialised.ONE if param.do_not_specialize_on_alignment else Specialised.ALIGNED
        specialised.append(Specialised.NOT if param.do_not_specialize else aligned)
    return tuple(specialised)


def arguments_of(args: Sequence[Any], specialised: Sequence[Specialised] | None) -> Arguments | None:
    """Return the arguments of a launch by a key, or None where they have none.

    Two launches with equal keys are of one compiled kernel: tensors with their dtype and whether their address is a
    multiple of 16, integers with their size, whether they are 1, and whether they are multiples of 16.
    """
    if specialised is None or len(args) > len(specialised):
        return None
    key, values, device = list[Any](), list[Any](), -1
    for arg, of_param in zip(args, specialised, strict=False):  # without those that are constants
        value = arg
        if isinstance(arg, Tensor):
            value = arg.data_ptr()
            unaligned = of_param == Specialised.ALIGNED and value % _ALIGNMENT
            key.append((arg.dtype,) if unaligned else arg.dtype)
            if device < 0:
                device = arg.get_device()
            if not arg.is_cuda:
                return None  # Triton refuses it
        elif type(arg) is int:
            key.append(_key_of_integer(arg, of_param))
        elif arg is None or type(arg) is float or type(arg) is bool:
            key.append(type(arg))
        else:
            return None
        values.append(value)
    return Arguments(tuple(key), values, device) if device >= 0 else None


def _key_of_integer(value: int, of_param: Specialised) -> int:
    """Return a number for integers that are compiled alike: 1 itself; others by size and whether 16 divides them."""
    if value == 1 and of_param:
        return 1
    size = 2 if -_INT32 <= value < _INT32 else 4 if value < _INT64 else 6
    return size + (of_param == Specialised.ALIGNED and value % _ALIGNMENT == 0)


def constants_key(constants: Mapping[str, Any]) -> bytes | None:
    """Return the names and values of constants as bytes, which tell 1 from 1.0 and True; None for other objects."""
    try:
        return marshal.dumps(constants, _PRIMITIVES)
    except ValueError:
        return None


def is_observed(kernel: Any) -> bool:
    """Return whether Triton's own launch does more than launch: for hooks, and for its settings of debugging."""
    runtime = triton.knobs.runtime
    hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
    if any(getattr(hook, "calls", hook) for hook in hooks) or getattr(kernel, "pre_run_hooks", ()):
        return True
    return bool(runtime.debug or getattr(runtime, "add_stages_inspection_hook", None))


@functools.cache
def _tell_once(lacking: str) -> None:
    log.warning("Triton %s launches kernels itself, which takes longer: %s", triton.__version__, lacking)

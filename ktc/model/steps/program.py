"""A recorded step as a program, compared with the recording before its first use.

In: a computation, and the tensors that change between its runs. Out: its output, whose tensors the program writes, and
the program. Operations without a native form are called as they are, between native calls.
Refused (`ValueError`): what `record` refuses, and an operation whose values differ from the recorded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map

from ktc.model.kernels.kernel_calls import HostCall
from ktc.model.kernels.kernel_library import TURNS, Kernel, NativeProgram
from ktc.model.steps.arena import Arena
from ktc.model.steps.lowering import Builder
from ktc.model.steps.recording import Operation, Recording, record, storage

# Relative Frobenius error of one operation on the same inputs. A bf16 or fp16 whose fp32 is between two of its values
# may be rounded to either.
TOLERANCE: Final = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5, torch.complex64: 1e-5}
_EXACT_TO: Final = 1e-12  # of fp64; integers are equal
_NATIVE: Final = "native"


@dataclass(frozen=True, slots=True)
class Stretch:
    """Operations that run together: a range of the native program, or one `call` of PyTorch."""

    name: str
    begin: int
    end: int
    call: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class StepProgram:
    """The operations of a step. `foreign` names those that PyTorch computes; `nbytes` is the memory between them."""

    native: NativeProgram
    stretches: tuple[Stretch, ...]
    nbytes: int
    kept: tuple[object, ...]

    @property
    def foreign(self) -> tuple[str, ...]:
        """The operations without a native form, in order."""
        return tuple(each.name for each in self.stretches if each.call is not None)

    def run(self) -> None:
        """Compute the step. Raises what a kernel raises."""
        for stretch in self.stretches:
            if stretch.call is None:
                with TURNS:
                    self.native.run(stretch.begin, stretch.end)
            else:
                with torch.inference_mode(mode=False), torch.no_grad():
                    stretch.call()


def record_program(
    compute: Callable[[], Any], changing: Iterable[Tensor], kernel: Kernel, threads: int,
    results: Callable[[Any], Sequence[Tensor]],
) -> tuple[Any, StepProgram, tuple[Tensor, ...]]:  # fmt: skip
    """Record `compute`. Return its output, the program, and the tensors that stand for `results(output)` in it."""
    recording = record(compute, changing)
    kept = tuple(results(recording.output))
    with torch.inference_mode(mode=False), torch.no_grad():
        arena = Arena(recording, kept)
        step = kernel.step()
        builder = Builder(step, step.program(), kernel.engine(threads))
        parts = [_appended(operation, arena, builder) for operation in recording.operations]
        program = StepProgram(builder.program, _joined(parts), arena.nbytes, (recording.held, arena, builder, parts))
        _compare(recording, arena, parts, builder.program)
        program.run()
        return recording.output, program, tuple(arena[each] for each in kept)


def _appended(operation: Operation, arena: Arena, builder: Builder) -> Stretch:
    begin = len(builder.program)
    if operation.call is not None:
        bound = _bound(operation, arena)
        builder.kept.append(bound)
        builder.program.call(bound.native)
        return Stretch(_NATIVE, begin, len(builder.program))
    of: Any = operation.function

    def placed(value: Any) -> Any:
        return arena[value] if isinstance(value, Tensor) else value

    args, kwargs = tree_map(placed, (operation.args, operation.kwargs))
    outs = tuple(arena[each] for each in operation.writes)
    name = str(of.__name__).partition(".")[0]
    if of.namespace == "aten" and builder.add(name, args, _without_defaults(kwargs), outs):
        return Stretch(_NATIVE, begin, len(builder.program))
    begin = len(builder.program)  # what was appended before a part without a native form was met is never run

    def call() -> None:
        found = (each for each in tree_iter(of(*args, **kwargs)) if isinstance(each, Tensor))
        for out, value in zip(outs, found, strict=False):
            if out.data_ptr() != value.data_ptr():
                out.copy_(value)

    return Stretch(operation.name, begin, begin, call)


def _bound(operation: Operation, arena: Arena) -> HostCall:
    call = operation.call
    assert call is not None
    reads = tuple(None if each is None else arena[each] for each in call.reads)
    return call.bind(reads, arena[call.out])


def _without_defaults(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Leave out what says where and how a result is stored: the result of the program says it."""
    stored = ("dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking")
    return {name: value for name, value in kwargs.items() if name not in stored}


def _joined(parts: Sequence[Stretch]) -> tuple[Stretch, ...]:
    joined: list[Stretch] = []
    for part in parts:
        if joined and part.call is None and joined[-1].call is None:
            joined[-1] = Stretch(_NATIVE, joined[-1].begin, part.end)
        else:
            joined.append(part)
    return tuple(joined)


# The comparison with the recording -------------------------------------------------------------------------------
def _compare(recording: Recording, arena: Arena, parts: Sequence[Stretch], native: NativeProgram) -> None:
    """Run every operation on the recorded values, and raise `ValueError` where it computes others.

    Memory that is written twice has lost the values of the first time: it keeps what the program wrote.
    """
    writes: dict[int, int] = {}
    for operation in recording.operations:
        for tensor in operation.writes:
            writes[storage(tensor)] = writes.get(storage(tensor), 0) + 1
    once = {place for place, count in writes.items() if count == 1}
    for operation, part in zip(recording.operations, parts, strict=True):
        for tensor in operation.reads:
            if storage(tensor) in once:
                arena.restore(tensor)
        StepProgram(native, (part,), 0, ()).run()
        for tensor in operation.writes:
            if storage(tensor) in once and not close(arena[tensor], tensor):
                raise ValueError(f"the native form of `{operation.name}` computes other values")


def close(found: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors are equal up to the rounding of one operation, with NaN and infinities in place."""
    if found is expected or not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(found, expected)
    finite = torch.isfinite(expected)
    if not torch.equal(torch.nan_to_num(found)[~finite], torch.nan_to_num(expected)[~finite]):
        return False
    wide = torch.complex128 if expected.is_complex() else torch.float64
    known, other = expected[finite].to(wide), found[finite].to(wide)
    error, size = float((other - known).abs().square().sum().sqrt()), float(known.abs().square().sum().sqrt())
    return error <= TOLERANCE.get(expected.dtype, _EXACT_TO) * size

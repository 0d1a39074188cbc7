"""A recorded step as a program, compared with the recording before its first use.

In: a computation, and the tensors that change between its runs. Out: its output, whose tensors the program writes, and
the program. Operations without a native form are called as they are, between native calls.
Refused (`ValueError`): as `record`, and an operation whose values differ from the recorded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ktc.model.experts.private_api import tree_iter, tree_map
from ktc.model.kernels.kernel_library import KERNEL_LOCK, Kernel, NativeProgram, NativeStep
from ktc.model.kernels.step_context import StepContext
from ktc.model.steps.arena import Arena
from ktc.model.steps.lowering import Builder
from ktc.model.steps.recording import Operation, Recording, operator_name, record, storage, times_written

# Relative Frobenius error of one operation on the same inputs. An fp32 value between two values of bf16 or fp16 may be
# rounded to either.
TOLERANCE: Final = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5, torch.complex64: 1e-5}
_EXACT_TO: Final = 1e-12  # of fp64; integers are equal
_NATIVE: Final = "native"


@dataclass(frozen=True, slots=True)
class Segment:
    """Operations that run together: a range of the native program, or one `call` of PyTorch."""

    name: str
    begin: int
    end: int
    call: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class StepProgram:
    """The operations of a step. `foreign` names those that PyTorch computes; `nbytes` is the memory between them."""

    native: NativeProgram
    segments: tuple[Segment, ...]
    nbytes: int
    kept: tuple[object, ...]

    @property
    def foreign(self) -> tuple[str, ...]:
        """The operations without a native form, in order."""
        return tuple(segment.name for segment in self.segments if segment.call is not None)

    def run(self) -> None:
        """Compute the step. Raises what a kernel raises."""
        for segment in self.segments:
            if segment.call is None:
                with KERNEL_LOCK:
                    self.native.run(segment.begin, segment.end)
            else:
                with torch.inference_mode(mode=False), torch.no_grad():
                    segment.call()


def record_program(
    compute: Callable[[], Any], changing: Iterable[Tensor], kernel: Kernel, threads: int,
    results: Callable[[Any], Sequence[Tensor]], context: StepContext,
) -> tuple[Any, StepProgram, tuple[Tensor, ...]]:  # fmt: skip
    """Record `compute`, whose kernels are those of a model with this context.

    Return its output, the program, and the tensors that stand for `results(output)` in it.
    """
    recording = record(compute, changing, context)
    kept = tuple(results(recording.output))
    with torch.inference_mode(mode=False), torch.no_grad():
        arena = Arena(recording, kept)
        step: NativeStep = kernel.native()
        builder = Builder(step, step.program(), kernel.engine(threads))
        parts = [_appended(operation, arena, builder) for operation in recording.operations]
        program = StepProgram(builder.program, _joined(parts), arena.nbytes, (recording.kept, arena, builder, parts))
        _compare(recording, arena, parts, builder.program)
        program.run()
        return recording.output, program, tuple(arena[tensor] for tensor in kept)


def _appended(operation: Operation, arena: Arena, builder: Builder) -> Segment:
    begin = len(builder.program)
    if (recorded := operation.call) is not None:
        reads = tuple(None if tensor is None else arena[tensor] for tensor in recorded.reads)
        bound = recorded.bind(reads, arena[recorded.out])
        builder.kept.append(bound)
        builder.program.call(bound.native)
        return Segment(_NATIVE, begin, len(builder.program))
    of: Any = operation.function

    def placed(value: Any) -> Any:
        return arena[value] if isinstance(value, Tensor) else value

    args, kwargs = tree_map(placed, (operation.args, operation.kwargs))
    outs = tuple(arena[tensor] for tensor in operation.writes)
    if of.namespace == "aten" and builder.add(operator_name(of), args, _without_storage(kwargs), outs):
        return Segment(_NATIVE, begin, len(builder.program))
    begin = len(builder.program)  # what was appended before a part without a native form was met is never run

    def call() -> None:
        results = (leaf for leaf in tree_iter(of(*args, **kwargs)) if isinstance(leaf, Tensor))
        for out, value in zip(outs, results, strict=False):
            if out.data_ptr() != value.data_ptr():
                out.copy_(value)

    return Segment(operation.name, begin, begin, call)


def _without_storage(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Leave out where and how a result is stored, which the program's own tensor decides."""
    stored = ("dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking")
    return {name: value for name, value in kwargs.items() if name not in stored}


def _joined(parts: Sequence[Segment]) -> tuple[Segment, ...]:
    joined: list[Segment] = []
    for part in parts:
        if joined and part.call is None and joined[-1].call is None:
            joined[-1] = Segment(_NATIVE, joined[-1].begin, part.end)
        else:
            joined.append(part)
    return tuple(joined)


# The comparison with the recording -------------------------------------------------------------------------------
def _compare(recording: Recording, arena: Arena, parts: Sequence[Segment], native: NativeProgram) -> None:
    """Run every operation on the recorded values, and raise `ValueError` where it computes others.

    Memory that is written twice has lost the values of the first time: it keeps the program's own.
    """
    once = {place for place, count in times_written(recording.operations).items() if count == 1}
    for operation, part in zip(recording.operations, parts, strict=True):
        for tensor in operation.reads:
            if storage(tensor) in once:
                arena.restore(tensor)
        StepProgram(native, (part,), 0, ()).run()
        for tensor in operation.writes:
            if storage(tensor) in once and not close(arena[tensor], tensor):
                raise ValueError(f"the native form of `{operation.name}` computes other values")


def close(computed: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors are equal up to the rounding of one operation, with NaN and infinities in place."""
    if computed is expected or not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(computed, expected)
    finite = torch.isfinite(expected)
    if not torch.equal(torch.nan_to_num(computed)[~finite], torch.nan_to_num(expected)[~finite]):
        return False
    wide = torch.complex128 if expected.is_complex() else torch.float64
    known, other = expected[finite].to(wide), computed[finite].to(wide)
    error, size = float((other - known).abs().square().sum().sqrt()), float(known.abs().square().sum().sqrt())
    return error <= TOLERANCE.get(expected.dtype, _EXACT_TO) * size

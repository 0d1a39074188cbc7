"""A computation as the list of operations that it consists of.

In: a computation on the CPU, and the tensors whose values change from run to run. Out: its operations of PyTorch and
calls of kernels that depend on those tensors, in order, with the tensors that they read and wrote. Other values are
computed once, and kept.
Refused (`ValueError`): a computation that reads a changing value into Python, whose sizes depend on values, that draws
random numbers, or that reads memory which nothing recorded has written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ktc.model.experts.private_api import TorchDispatchMode, schema_of, tree_iter
from ktc.model.kernels.kernel_calls import KernelCall
from ktc.model.kernels.step_context import StepContext

_ALLOCATING: Final = frozenset({"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"})
_SEEDED: Final = torch.Tag.nondeterministic_seeded
# Operations that may write memory which outlives the step: repeated on the same values, they leave the same.
_STORES: Final = frozenset({"index_copy_", "copy_", "fill_", "zero_"})
_SIZED_BY_VALUES: Final = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of PyTorch, with its arguments, or one call of a kernel."""

    name: str
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    function: Any = None  # an overload of an operator
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    call: KernelCall | None = None


@dataclass(frozen=True, slots=True)
class Recording:
    """The operations to run again, the storages that they allocate (by address), and all that must stay alive."""

    operations: tuple[Operation, ...]
    inner: frozenset[int]
    kept: tuple[Tensor, ...]
    output: Any


def record(compute: Callable[[], Any], changing: Iterable[Tensor], context: StepContext) -> Recording:
    """Run `compute` without gradients and return its operations. The values of `changing` differ in each run.

    `context` is that of the model whose kernels `compute` calls.
    """
    recorder = _Recorder()
    recorded = context.entered(recorder=recorder.kernel)
    with torch.inference_mode(mode=False), torch.no_grad(), _NoValues(), recorder, recorded:
        output = compute()
    outside = {storage(tensor) for tensor in changing}
    outside |= {storage(tensor) for one in recorder.operations for tensor in one.writes} - recorder.allocated
    repeated = _repeated(recorder.operations, outside)
    for operation in recorder.operations:
        if id(operation) in repeated:
            _require_repeatable(operation)
    _require_written(recorder.operations, repeated, recorder.allocated)
    operations = tuple(operation for operation in recorder.operations if id(operation) in repeated)
    inner = {storage(tensor) for operation in operations for tensor in operation.writes} & recorder.allocated
    kept = tuple(tensor for tensor in recorder.kept if storage(tensor) not in inner)
    return Recording(operations, frozenset(inner), kept, output)


def storage(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which tensors on the same memory share."""
    return tensor.untyped_storage().data_ptr()


class _NoValues(TorchFunctionMode):
    """Refuses functions that read values into Python without an operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            raise ValueError(f"`{func.__name__}` reads values of a tensor into Python")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.allocated: set[int] = set()
        self.kept: list[Tensor] = []  # no address is used twice while its tensor lives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _SEEDED in func.tags and _argument(func, "dropout_p", args, kwargs) != 0:
            raise ValueError(f"`{func}` draws random numbers")
        changed = tuple(_changed(func, args, kwargs))
        if operator_name(func) not in _STORES and any(storage(tensor) not in self.allocated for tensor in changed):
            raise ValueError(f"`{func}` changes memory that outlives the step")
        before = len(self.operations)
        out = func(*args, **kwargs)
        if len(self.operations) > before:
            raise ValueError(f"`{func}` calls kernels of its own")
        reads, results = _tensors((args, kwargs)), _tensors(out)
        if any(tensor.is_conj() or tensor.is_neg() for tensor in (*reads, *results)):
            raise ValueError(f"`{func}` has a conjugated or negated view")
        self.kept += [*reads, *results]
        known = {storage(tensor) for tensor in reads}
        new = [tensor for tensor in results if storage(tensor) not in known]
        self.allocated.update(storage(tensor) for tensor in new)
        if operator_name(func) in _ALLOCATING:
            return out
        if new or changed or not results:
            self.operations.append(Operation(str(func), reads, (*new, *changed), func, tuple(args), dict(kwargs)))
        return out

    def kernel(self, call: KernelCall) -> None:
        reads = tuple(tensor for tensor in call.reads if tensor is not None)
        self.kept += [*reads, call.out]
        self.operations.append(Operation("a kernel", reads, (call.out,), call=call))


def _tensors(tree: Any) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor))


def operator_name(func: Any) -> str:
    """Return the name of an operator of PyTorch without its overload."""
    return str(func.__name__).partition(".")[0]


def times_written(operations: Iterable[Operation]) -> Counter[int]:
    """Return the number of operations that write to each storage."""
    return Counter(place for operation in operations for place in {storage(tensor) for tensor in operation.writes})


def _argument(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return an argument of a call by its name, its default where the call has none, None where it has no such name."""
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.name == name:
            return args[position] if position < len(args) else kwargs.get(name, argument.default_value)
    return None


def _changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the arguments that an operation writes to, by its schema."""
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        yield from _tensors(value)


def _repeated(operations: list[Operation], changing: set[int]) -> set[int]:
    """Return the ids of the operations that later runs repeat.

    They are those with a changing input, and every other that writes where one of these writes. Memory that is written
    more than once counts as changing.
    """
    changing = changing | {place for place, count in times_written(operations).items() if count > 1}
    repeated: set[int] = set()
    while True:
        before = len(repeated), len(changing)
        for operation in operations:
            places = {storage(tensor) for tensor in (*operation.reads, *operation.writes)}
            if places & changing:
                repeated.add(id(operation))
                changing |= {storage(tensor) for tensor in operation.writes}
        if (len(repeated), len(changing)) == before:
            return repeated


def _require_repeatable(operation: Operation) -> None:
    if operation.call is not None:
        return
    tags = cast("set[torch.Tag]", set(operation.function.tags))
    if not operation.writes:
        raise ValueError(f"`{operation.name}` reads a value of the step into Python")
    by_number = operator_name(operation.function) == "index" and all(
        tensor.dtype != torch.bool for tensor in operation.reads[1:]
    )
    if tags & set(_SIZED_BY_VALUES) and not by_number:
        raise ValueError(f"the sizes of `{operation.name}` depend on values of the step")


def _require_written(operations: list[Operation], repeated: set[int], allocated: set[int]) -> None:
    written: set[int] = set()
    for operation in operations:
        missing = {storage(tensor) for tensor in operation.reads if tensor.numel()} & allocated
        if id(operation) in repeated and not missing <= written | {storage(tensor) for tensor in operation.writes}:
            raise ValueError(f"`{operation.name}` reads what no recorded operation has written")
        written |= {storage(tensor) for tensor in operation.writes}

"""Experts of the CPU as host nodes of a CUDA graph: the GPU's stream waits for a C function that runs their kernel.

A thread of the library makes the calls that the GPU requests (`mailbox.py`); otherwise CUDA does, by host functions.
In: while `HostNodes.recorded` is entered, the calls of experts by a model on a GPU, in a stream that may be captured.
Out: the same results on the GPU. Each call is a kernel that writes pinned memory (`CallMemory`), the C function, and a
kernel that reads its result. The last two run beside what the model does until it needs the result (`Beside`), such
as shared experts. The layers of a step share the pinned memory, since each of them waits for the one before. `check`
raises the errors of host functions. A replayed graph runs no Python.
Refused: a process without CUDA's runtime library, a stream that takes no host function (`RuntimeError`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ktc.model.experts.host.beside import Beside, SideStream, StreamOrder
from ktc.model.experts.host.call_memory import CallMemory
from ktc.model.experts.host.mailbox import Mailbox, mailbox_for
from ktc.model.experts.layouts.packed import PackedExperts
from ktc.model.experts.trained.lora import ExpertsLora
from ktc.model.kernels.kernel_calls import HostCall
from ktc.model.kernels.kernel_library import KernelLibrary
from ktc.model.kernels.step_context import StepContext

Launch = Callable[[int, int], None]  # the addresses of a C function and of its argument


class CpuReads(NamedTuple):
    """The bytes of experts that calls have read, their time, and how many they are.

    `squares` are the sum of squared bytes of a call, and `products` that of its bytes times its nanoseconds.
    """

    nbytes: int = 0
    nanoseconds: int = 0
    calls: int = 0
    squares: float = 0.0
    products: float = 0.0


class HostNodes:
    """The calls of experts in one step of a model, and the memory that they share with the GPU."""

    def __init__(
        self, launch: Launch | None = None, order: StreamOrder | None = None, *, by_thread: bool | None = None
    ) -> None:
        """With `by_thread`, a thread makes the calls where it can; otherwise `launch` puts them into a stream.

        None: where CUDA launches.
        """
        self._launch = launch or on_current_stream
        self._by_thread = self._launch is on_current_stream if by_thread is None else by_thread
        self._mailboxes: dict[tuple[KernelLibrary, torch.device], Mailbox | None] = {}
        self._beside = Beside(order or SideStream())
        self._calls: list[tuple[PackedExperts, HostCall]] = []
        self._partial: list[tuple[PackedExperts, HostCall]] = []
        self.begun = self._begun_before = 0  # replays: all of them, and those of earlier captures
        self._reads_before = CpuReads()  # of partial calls that were dropped
        self._memories: dict[tuple[object, ...], CallMemory] = {}

    @contextmanager
    def recorded(self, context: StepContext) -> Generator[None]:
        """Record the experts' calls of the model with this context, inside the block.

        Earlier calls are dropped: no stream may still run them.
        """
        self._reads_before, self._begun_before = self.reads, self.begun
        self._partial.clear()
        self._calls.clear()
        for mailbox in self._used():
            mailbox.forget()
        with context.entered(host_nodes=self), self._beside.entered():
            yield

    def run(
        self, packed: PackedExperts, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, lora: ExpertsLora,
        *, interleaved: bool,
    ) -> Tensor:  # fmt: skip
        """Enqueue the call of a layer's experts: `(T, H), (T, K) int64, (T, K) -> (T, H)`, all on the GPU.

        Dtypes are the kernel's, and factors of LoRA are in host memory.
        """
        memory = self._free(x_TH, index_TK, weights_TK)
        call = packed.host_call(memory.x, memory.index, memory.weights, memory.out, lora, interleaved=interleaved)
        return self._started(packed, call, memory, (x_TH, index_TK, weights_TK))

    def run_rest(
        self, packed: PackedExperts, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor,
        beside: Callable[[], Tensor] | None,
    ) -> Tensor:  # fmt: skip
        """Enqueue the call of those experts that are left to the CPU: see `PackedExperts.partial_call`.

        `beside` enqueues the work of the GPU at the same time and returns its results (T, H), which are added.
        """
        memory = self._free(x_TH, index_TK, weights_TK)
        call = packed.partial_call(memory.x, memory.index, memory.weights, memory.out)
        self._partial.append((packed, call))
        out = self._started(packed, call, memory, (x_TH, index_TK, weights_TK))
        if beside is not None:
            computed = beside()
            self._beside.then(lambda: torch.add(out, computed, out=out))
        return out

    @property
    def reads(self) -> CpuReads:
        """The reads of partial calls so far, those of dropped ones included. Empty calls are not counted."""
        nbytes, nanoseconds, calls, squares, products = self._reads_before
        for packed, call in self._partial:
            work, units = call.work, packed.sizes.num_experts * packed.sizes.intermediate
            nbytes += work.amount * packed.nbytes // units
            nanoseconds += work.nanoseconds
            calls += work.runs
            squares += work.squares * (packed.nbytes / units) ** 2
            products += work.products * packed.nbytes / units
        return CpuReads(nbytes, nanoseconds, calls, squares, products)

    def begin(self) -> None:
        """Take note that the captured calls come again: a replay begins."""
        self.begun += 1
        for mailbox in self._used():
            mailbox.begin()

    @property
    def launched(self) -> bool:
        """Whether CUDA calls some experts."""
        return bool(self._calls) and (not self._by_thread or None in self._mailboxes.values())

    def until_answered(self, is_over: Callable[[], bool], number: int | None = None) -> None:
        """Sleep until a thread has made all calls of the replay `number` by `begun`, or of all that have begun.

        See `Mailbox.until_answered`.
        """
        later = 0 if number is None else self.begun - number
        for mailbox in self._used():
            mailbox.until_answered(is_over, later)

    def dismiss(self) -> None:
        """Take note that calls which have begun do not come: the GPU has failed."""
        for mailbox in self._used():
            mailbox.dismiss()

    def _used(self) -> Iterator[Mailbox]:
        return (mailbox for mailbox in self._mailboxes.values() if mailbox is not None)

    def _free(self, *inputs: Tensor) -> CallMemory:
        """Return the memory of a call with such inputs."""
        self._beside.join()  # calls before this one read the same memory
        return self._memory(*inputs)

    def _started(
        self, packed: PackedExperts, call: HostCall, memory: CallMemory, inputs: tuple[Tensor, Tensor, Tensor]
    ) -> Tensor:  # fmt: skip
        """Start a call beside the model's stream, and return its result, shaped like its hidden states."""
        mailbox = self._mailbox(packed, call, memory, inputs)
        if mailbox is None:
            memory.put(*inputs)
        else:
            mailbox.post(memory, inputs, call)
        like = inputs[0]
        out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        self._calls.append((packed, call))

        def compute() -> None:
            if mailbox is None:
                self._launch(call.function, call.address)
                memory.get(out)
            else:
                mailbox.take(memory, out)

        self._beside.start(out, compute)
        return out

    def _mailbox(
        self, packed: PackedExperts, call: HostCall, memory: CallMemory, inputs: tuple[Tensor, Tensor, Tensor]
    ) -> Mailbox | None:
        """Return where a call is requested. None is made in a capture: the steps before it have."""
        if not self._by_thread:
            return None
        key = packed.library, inputs[0].device
        if key not in self._mailboxes:
            self._mailboxes[key] = mailbox_for(packed, memory, inputs, call)
        return self._mailboxes[key]

    def check(self, name_of: Callable[[PackedExperts], str], number: int | None = None) -> None:
        """Raise the first error of the calls since the last check, with notes that name the layers of all errors.

        The stream of the calls must be done. With the replay `number` by `begun`, those of later ones may be under way,
        and their errors stay.
        """
        runs = None if number is None else max(1, number - self._begun_before)  # 1: of a step that is recorded again
        errors: list[tuple[Exception, str]] = []
        for packed, call in self._calls:  # all of them: an error that stays would be raised after another step
            try:
                call.rethrow(runs)
            except Exception as error:  # noqa: BLE001 - a kernel's error of any class; the first is raised below
                errors.append((error, name_of(packed)))
        if not errors:
            for mailbox in self._used():
                mailbox.check()
            return
        (first, name), *others = errors
        first.add_note(f"in the experts of `{name}`, computed within a CUDA graph")
        for error, name in others:
            first.add_note(f"and in those of `{name}`: {error}")
        raise first

    def _memory(self, *inputs: Tensor) -> CallMemory:
        """Return the memory of calls with such inputs. None is made in a capture: the steps before it have."""
        key = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in inputs)
        if key not in self._memories:
            self._memories[key] = CallMemory(*inputs)
        return self._memories[key]


def launch_on(device: torch.device) -> Launch:
    """Return what enqueues a C function on a device; the CPU calls it at once."""
    return on_current_stream if device.type == "cuda" else _call_at_once


def _call_at_once(function: int, argument: int) -> None:
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)


def on_current_stream(function: int, argument: int) -> None:
    """Enqueue `function(argument)` in the current stream of CUDA. Raises `RuntimeError` where that fails."""
    status = _launcher()(torch.cuda.current_stream().cuda_stream, function, argument)
    if status != 0:
        raise RuntimeError(f"a host function could not be put into the stream: CUDA error {status}")


@functools.cache
def _launcher() -> Callable[[int, int, int], int]:
    """Return `cudaLaunchHostFunc` of the runtime library that torch has loaded: torch has no binding of it."""
    try:
        loaded = runtime_libraries(Path("/proc/self/maps").read_text())
        if not loaded:
            raise RuntimeError("this process has not loaded CUDA's runtime library (libcudart)")
        function = ctypes.CDLL(min(loaded)).cudaLaunchHostFunc
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"CUDA's runtime library (libcudart) cannot be used: {error}") from error
    function.argtypes, function.restype = [ctypes.c_void_p] * 3, ctypes.c_int
    return function


def runtime_libraries(maps: str) -> set[str]:
    """Return the paths of CUDA's runtime library in `/proc/self/maps`: the sixth column, which may have spaces."""
    rows = (line.split(maxsplit=5) for line in maps.splitlines())
    return {row[5] for row in rows if len(row) > 5 and "libcudart" in Path(row[5]).name}

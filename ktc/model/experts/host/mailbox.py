"""Calls of experts that a GPU requests from a thread of the host, by words in memory that both see.

In: a call of a kernel and its inputs on the GPU. Out: its result there. A kernel of the GPU writes inputs and request,
and another one waits for the answer: some microseconds, where the driver takes tens for a host function. The thread
(`ktc::HostThread`) looks for requests while it expects some, and sleeps otherwise. Steps that are captured say how many
requests a replay makes (`begin`). A thread that never answers is an error of the step after many minutes.
`mailbox_for` says whether a device is served so; other devices have host functions of CUDA.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Final

import torch
from torch import Tensor

from ktc.diagnostics import Diagnostic, render
from ktc.model.experts.host.call_memory import CallMemory, seen_by
from ktc.model.experts.layouts.packed import PackedExperts
from ktc.model.kernels.kernel_calls import HostCall
from ktc.model.kernels.triton_support import lacking

log = logging.getLogger(__name__)

PATIENCE: Final = 1 << 30  # looks of the GPU, each of at least half a microsecond
_LOOK: Final = 0.25  # seconds
_LINE: Final = 128  # bytes between words of which one is written while the other one is read
_OF_TRIAL: Final = 1 << 21


class Mailbox:
    """The mailbox of one step's calls by the kernels of one library, and the thread that serves it."""

    def __init__(self, packed: PackedExperts, device: torch.device, patience: int = PATIENCE) -> None:
        self.patience = patience
        native = packed.host_thread
        with torch.inference_mode(mode=False):
            size = native.mailbox_bytes + _LINE
            memory = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
            self._ordered, self._failed = torch.zeros(2, 1, dtype=torch.int32, device=device)
        self._thread = native(memory.data_ptr(), memory)
        seen = memory if (of_device := seen_by(memory, device)) is None else of_device
        self._call = seen[:8].view(torch.int64)
        self._done = seen[native.done_at :][:4].view(torch.int32)
        self._told = seen[native.mailbox_bytes :][:4].view(torch.int32)
        self._told_here = memory[native.mailbox_bytes :][:4].view(torch.int32)
        self._captured = 0

    def __del__(self) -> None:
        """End the thread before the calls that a GPU may still request, which are in the same step."""
        self.__dict__.pop("_thread", None)

    def post(self, memory: CallMemory, inputs: tuple[Tensor, Tensor, Tensor], call: HostCall) -> None:
        """Enqueue the transfer of a call's inputs, and the request to make the call."""
        if inputs[0].is_cuda and torch.cuda.is_current_stream_capturing():
            self._captured += 1
        else:
            self._thread.expect(1)
        words = memory.words(*inputs)
        if sum(map(len, words)) > _kernels().MOST_SENT:
            memory.put(*inputs)
            words = []
        _kernels().post(words, memory.seen_inputs, self._call, self._done, self._ordered, call.address)

    def take(self, memory: CallMemory, out: Tensor) -> None:
        """Enqueue the wait for the call and the transfer of its result."""
        _kernels().take(out, memory.seen_out, self._done, self._failed, self._told, self.patience)

    def answers(self, memory: CallMemory, inputs: tuple[Tensor, Tensor, Tensor], call: HostCall) -> bool:
        """Make a call, wait for it, and return whether both sides have seen what the other one has written."""
        out = torch.zeros_like(inputs[0])
        self.post(memory, inputs, call)
        self.take(memory, out)
        sent = zip(inputs, (memory.x, memory.index, memory.weights), strict=True)
        is_answered = not int(self._failed) and all(_are_equal(there, here) for there, here in sent)
        if not is_answered:
            self.dismiss()
        return is_answered and _are_equal(out, memory.out)

    def forget(self) -> None:
        """Forget the calls of an earlier capture."""
        self._captured = 0

    def begin(self) -> None:
        """Expect the requests of a replay of what was captured."""
        if self._captured:
            self._thread.expect(self._captured)

    def until_answered(self, is_over: Callable[[], bool], later: int = 0) -> None:
        """Sleep until all expected requests are answered, less those of the last `later` replays.

        `is_over` is asked now and then whether none will come.
        """
        while not self._thread.wait(_LOOK, later * self._captured) and not is_over():
            pass

    def dismiss(self) -> None:
        """Expect no requests any more: the GPU has failed, or is not asked to compute."""
        self._thread.dismiss()

    def check(self) -> None:
        """Raise `RuntimeError` if the GPU has waited in vain. The stream of the calls must be done."""
        if int(self._told_here):
            self._told_here.zero_()
            self._failed.zero_()
            self.dismiss()
            raise RuntimeError("the thread that computes experts on the CPU has not answered the GPU")


def mailbox_for(
    packed: PackedExperts, memory: CallMemory, inputs: tuple[Tensor, Tensor, Tensor], call: HostCall
) -> Mailbox | None:
    """Return a mailbox after a first call has been answered with its values, None where none serves.

    None serves a device for which Triton does not compile, one whose inputs are copied, and one that gets no answers,
    with a warning (L466). The host makes the call before: weights that are read from a disk take longer than the trial.
    """
    device = inputs[0].device
    if lacking(device) or not memory.is_shared:
        return None
    memory.put(*inputs)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    call.make()
    mailbox = Mailbox(packed, device, _OF_TRIAL)
    if not mailbox.answers(memory, inputs, call):
        _tell_of_functions(device)
        return None
    mailbox.patience = PATIENCE
    return mailbox


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether values have the same bits: a result can be NaN."""
    return torch.equal(one.cpu().view(torch.int16), other.view(torch.int16))


@functools.cache
def _tell_of_functions(device: torch.device) -> None:
    """Warn (L466) that host functions of CUDA call experts. Once per process and device."""
    message = f"`{device}` does not see in time what the CPU writes into pinned memory: CUDA calls experts on the CPU"
    hint = "each layer of a step takes some tens of microseconds longer; see `ktc explain L466`"
    log.warning("%s", render([Diagnostic("L466", message, hint=hint, severity="warning")]))


def _kernels() -> ModuleType:
    """Return what needs Triton."""
    from ktc.model.experts.gpu import mailbox_kernels

    return mailbox_kernels

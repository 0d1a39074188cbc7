"""Calls that run while the caller does something else: on one thread of their own, in the order they were made.

In: a function of host tensors, and its inputs. Out: a `Pending`. Kernels release the GIL, so that Python goes on; and
inputs on a GPU are copied to pinned memory by a stream of their own, so that the GPU does. Its other work is waited for
by events only. Nothing here records gradients.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

Compute = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class _Result:
    """A tensor, and for one on a GPU the event after which it is there."""

    tensor: Tensor
    ready: torch.cuda.Event | None


class Pending:
    """The result of a call that was submitted. Its inputs must not be changed before it is done."""

    def __init__(self, future: Future[_Result]) -> None:
        self._future = future

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._future.done()

    def wait(self) -> Tensor:
        """The result, on the device of its input; what the call raised is raised here.

        On a GPU it is ready for the current stream, which waits for it; the caller does not.
        """
        result = self._future.result()
        if result.ready is not None:
            stream = torch.cuda.current_stream(result.tensor.device)
            stream.wait_event(result.ready)
            result.tensor.record_stream(stream)
        return result.tensor


def submit(compute: Compute, *inputs: Tensor) -> Pending:
    """Call `compute` with `inputs` on the host; the result goes to the device of the first of them."""
    device = inputs[0].device
    if device.type == "cuda":
        return Pending(_executor().submit(_through_pinned_memory, compute, device, *_fetched(inputs, device)))
    return Pending(_executor().submit(_on_host, compute, inputs, device))


@torch.no_grad()
def _on_host(compute: Compute, inputs: tuple[Tensor, ...], device: torch.device) -> _Result:
    return _Result(compute(*inputs).to(device), None)


def _fetched(inputs: tuple[Tensor, ...], device: torch.device) -> tuple[list[Tensor], torch.cuda.Event]:
    """Pinned copies of what is on a GPU, and the event after which they hold their values."""
    stream = _streams(device)[0]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        copies = [each.detach() if each.device.type == "cpu" else _pinned(each, stream) for each in inputs]
    return copies, _recorded(stream)


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


def _pinned(tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor.detach(), non_blocking=True)
    tensor.record_stream(stream)  # its memory is not given to others before it was read
    return copy


@torch.no_grad()
def _through_pinned_memory(
    compute: Compute, device: torch.device, inputs: list[Tensor], arrived: torch.cuda.Event
) -> _Result:
    arrived.synchronize()
    computed = compute(*inputs)
    pinned = torch.empty(computed.shape, dtype=computed.dtype, pin_memory=True).copy_(computed)
    stream = _streams(device)[1]
    with torch.cuda.stream(stream):
        result = pinned.to(device, non_blocking=True)
    return _Result(result, _recorded(stream))


@functools.cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """To the host and back: a result does not wait for the inputs of calls after it."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


@functools.cache
def _executor() -> ThreadPoolExecutor:
    """One thread: a kernel takes all of a process's cores, so a second call would only wait for the first."""
    return ThreadPoolExecutor(1, thread_name_prefix="ktc experts")


os.register_at_fork(after_in_child=_executor.cache_clear)  # a child has none of its parent's threads

"""Copies to a device beside its other work, from host memory or within its own, and their durations.

In: bytes of both sides. Out: an `Arrival`, for which the device's current stream waits before it reads. On the CPU a
copy is done when it is issued.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

_PROBE_BYTES: Final = 64 << 20
_PROBES: Final = 3
Mark = torch.cuda.Event | None  # a place in the order of the device's work


class Arrival:
    """One copy, within host memory: it is over."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    @property
    def mark(self) -> Mark:
        """The place in the order of the device's work at which the copy is done."""
        return None

    def wait(self) -> None:
        """Let the device's work from now on wait for the copy."""

    def is_over(self) -> bool:
        """Return whether the copy is done, and whether the device has got beyond waiting for it."""
        return True

    def seconds(self) -> tuple[float, float]:
        """Return how long a copy that is over took, and how long the device waited for it, 0 if it did not."""
        return self._seconds, 0.0


class Copies:
    """The copies to one device; these are within host memory."""

    _device = torch.device("cpu")

    def send(self, source: Tensor, target: Tensor, after: Sequence[Mark]) -> Arrival:
        """Begin to copy once the device has passed all marks."""
        return self.send_parts([(source, target)], after)

    def send_parts(self, parts: Sequence[tuple[Tensor, Tensor]], after: Sequence[Mark]) -> Arrival:
        """Begin to copy sources to their targets, one after another, once the device has passed all marks."""
        began = time.perf_counter()
        for source, target in parts:
            target.copy_(source)
        return Arrival(time.perf_counter() - began)

    def mark(self) -> Mark:
        """Mark the work that the device has been given so far."""
        return None

    def keep(self, memory: Tensor) -> None:
        """Keep the memory from other use until the copies to it are done, if it is given up before."""

    def finish(self) -> None:
        """Wait for all work of the device."""

    def bus_speed(self, pages: Tensor) -> float:
        """Measure the bytes per second of copies from page-locked memory with nothing beside them."""
        source = pages[:_PROBE_BYTES]
        target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        self.finish()
        sent = [self.send(source, target, ()) for _ in range(_PROBES)]
        self.finish()
        return source.nbytes / min(arrival.seconds()[0] for arrival in sent)


class CudaCopies(Copies):
    """Copies on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))  # which may still read the target's old bytes

    def send_parts(self, parts: Sequence[tuple[Tensor, Tensor]], after: Sequence[Mark]) -> Arrival:
        with torch.cuda.stream(self._stream):
            for mark in after:
                assert mark is not None, "marks of this device are events"
                self._stream.wait_event(mark)
            began, arrived = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record(self._stream)
            for source, target in parts:
                target.copy_(source, non_blocking=True)
            arrived.record(self._stream)
        return _CudaArrival(self._device, began, arrived)

    def mark(self) -> Mark:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def keep(self, memory: Tensor) -> None:
        memory.record_stream(self._stream)

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)


class _CudaArrival(Arrival):
    def __init__(self, device: torch.device, began: torch.cuda.Event, arrived: torch.cuda.Event) -> None:
        self._device, self._began, self._arrived = device, began, arrived
        self._reached: torch.cuda.Event | None = None

    @property
    def mark(self) -> Mark:
        return self._arrived

    def wait(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        if not self._arrived.query():  # else nothing waits
            self._reached = torch.cuda.Event(enable_timing=True)
            self._reached.record(stream)
        stream.wait_event(self._arrived)

    def is_over(self) -> bool:
        return self._arrived.query() and (self._reached is None or self._reached.query())

    def seconds(self) -> tuple[float, float]:
        waited = 0.0 if self._reached is None else max(0.0, self._reached.elapsed_time(self._arrived))
        return self._began.elapsed_time(self._arrived) / 1e3, waited / 1e3


def copies_to(device: torch.device) -> Copies:
    """Return the copies to a device."""
    return CudaCopies(device) if device.type == "cuda" else Copies()

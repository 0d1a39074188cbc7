"""Copies from host memory to a device beside its other work, and how long they took.

In: bytes of both sides. Out: an `Arrival`, for which the device's current stream waits before it reads. On the CPU a
copy is done when it is issued.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

_PROBE_BYTES: Final = 64 << 20
_PROBES: Final = 3


class Arrival(Protocol):
    """One copy."""

    def wait(self) -> None:
        """Let the device's work from now on wait for the copy."""
        ...

    def is_over(self) -> bool:
        """Return whether the copy is done, and whether the device has got beyond waiting for it."""
        ...

    def seconds(self) -> tuple[float, float]:
        """Return how long a copy that is over took, and how long the device waited for it, 0 if it did not."""
        ...


class Mark(Protocol):
    """A place in the order of the device's work."""


class Copies(Protocol):
    """The copies to one device."""

    def send(self, source: Tensor, target: Tensor, after: Sequence[Mark]) -> Arrival:
        """Begin to copy once the device has passed all marks."""
        ...

    def mark(self) -> Mark:
        """Mark the work that the device has been given so far."""
        ...

    def keep(self, memory: Tensor) -> None:
        """Keep the memory from other use until the copies to it are done, if it is given up before."""
        ...

    def finish(self) -> None:
        """Wait for all work of the device."""
        ...

    def bus_speed(self, pages: Tensor) -> float:
        """Measure the bytes per second of copies from page-locked memory with nothing beside them."""
        ...


def copies_to(device: torch.device) -> Copies:
    """Return the copies to a device."""
    return CudaCopies(device) if device.type == "cuda" else HostCopies()


class CudaCopies:
    """Copies on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))  # which may still read what is to be overwritten

    def send(self, source: Tensor, target: Tensor, after: Sequence[Mark]) -> Arrival:
        """See `Copies.send`."""
        with torch.cuda.stream(self._stream):
            for mark in after:
                assert isinstance(mark, torch.cuda.Event)
                self._stream.wait_event(mark)
            began, arrived = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record(self._stream)
            target.copy_(source, non_blocking=True)
            arrived.record(self._stream)
        return _CudaArrival(self._device, began, arrived)

    def mark(self) -> Mark:
        """See `Copies.mark`."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def keep(self, memory: Tensor) -> None:
        """See `Copies.keep`."""
        memory.record_stream(self._stream)

    def finish(self) -> None:
        """See `Copies.finish`."""
        torch.cuda.synchronize(self._device)

    def bus_speed(self, pages: Tensor) -> float:
        """See `Copies.bus_speed`."""
        source = pages[:_PROBE_BYTES]
        target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        self.finish()
        sent = [self.send(source, target, ()) for _ in range(_PROBES)]
        self.finish()
        return source.nbytes / min(each.seconds()[0] for each in sent)


@dataclass(slots=True)
class _CudaArrival:
    device: torch.device
    began: torch.cuda.Event
    arrived: torch.cuda.Event
    reached: torch.cuda.Event | None = None

    def wait(self) -> None:
        stream = torch.cuda.current_stream(self.device)
        if not self.arrived.query():  # else nothing waits
            self.reached = torch.cuda.Event(enable_timing=True)
            self.reached.record(stream)
        stream.wait_event(self.arrived)

    def is_over(self) -> bool:
        return self.arrived.query() and (self.reached is None or self.reached.query())

    def seconds(self) -> tuple[float, float]:
        waited = 0.0 if self.reached is None else max(0.0, self.reached.elapsed_time(self.arrived))
        return self.began.elapsed_time(self.arrived) / 1e3, waited / 1e3


class HostCopies:
    """Copies within host memory."""

    def send(self, source: Tensor, target: Tensor, after: Sequence[Mark]) -> Arrival:
        """See `Copies.send`."""
        began = time.perf_counter()
        target.copy_(source)
        return _HostArrival(time.perf_counter() - began)

    def mark(self) -> Mark:
        """See `Copies.mark`."""
        return None

    def keep(self, memory: Tensor) -> None:
        """See `Copies.keep`."""

    def finish(self) -> None:
        """See `Copies.finish`."""

    def bus_speed(self, pages: Tensor) -> float:
        """See `Copies.bus_speed`."""
        source = pages[:_PROBE_BYTES]
        target = torch.empty_like(source)
        return source.nbytes / min(self.send(source, target, ()).seconds()[0] for _ in range(_PROBES))


@dataclass(frozen=True, slots=True)
class _HostArrival:
    took: float

    def wait(self) -> None:
        """Nothing is under way."""

    def is_over(self) -> bool:
        return True

    def seconds(self) -> tuple[float, float]:
        return self.took, 0.0

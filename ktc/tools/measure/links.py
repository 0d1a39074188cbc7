"""Engines that work side by side: a GPU's bus and the processor's reads, all buses at once, and copies between GPUs.

In: devices, and the threads that read memory. Out: figures in bytes/s. Tests take the CPU for a device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Final

import torch

from ktc.foundation.rates import Figure
from ktc.tools.measure.bus import Bus
from ktc.tools.measure.figures import figure, repeated, seconds, wait
from ktc.tools.measure.limits import Limits

_BUDGET: Final = 0.3  # seconds of one figure
_TOGETHER: Final = 0.6  # seconds in which bus and processor work at once
_PEER: Final = 256 << 20  # bytes


def alone(bus: Bus) -> Figure:
    """Return the bytes/s of one bus."""
    return repeated(lambda: bus.size / bus.copy(), _BUDGET)


def beside(bus: Bus, limits: Limits, duration: float = _TOGETHER) -> tuple[Figure, Figure]:
    """Return the bytes/s of the bus and of the processor's reads while both work."""
    ended = Event()

    def read() -> list[float]:
        rates = [limits.read()]
        while not ended.is_set():
            rates.append(limits.read())
        return rates[1:-1] or rates  # the first and the last may have run alone

    bus.copy()
    with ThreadPoolExecutor(1) as pool:
        reads = pool.submit(read)
        try:
            copies, end = [bus.size / bus.copy()], time.perf_counter() + duration
            while time.perf_counter() < end:
                copies.append(bus.size / bus.copy())
        finally:
            ended.set()
        return figure(copies), figure(reads.result())


def together(buses: Sequence[Bus]) -> Figure:
    """Return the bytes/s of all buses at once, summed."""

    def copy() -> float:
        began = time.perf_counter()
        for bus in buses:
            bus.start()
        for bus in buses:
            wait(bus.device)
        return sum(bus.size for bus in buses) / (time.perf_counter() - began)

    return repeated(copy, _BUDGET)


def peer(one: torch.device, other: torch.device, size: int = _PEER) -> Figure:
    """Return the bytes/s of copies from one device to another."""
    source = torch.ones(size, dtype=torch.uint8, device=one)
    target = torch.empty(size, dtype=torch.uint8, device=other)

    def copy() -> float:
        took = seconds(one, lambda: (target.copy_(source, non_blocking=True), wait(other)))
        return size / took

    return repeated(copy, _BUDGET)

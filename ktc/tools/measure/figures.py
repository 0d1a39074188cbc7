"""Measurements repeated for a while, and their figure: the median, and the interquartile range as a share of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Final

import torch

from ktc.foundation.rates import Figure

_FEWEST: Final = 3
_MOST: Final = 25


def figure(values: Sequence[float]) -> Figure:
    """Return the figure of measured values, of which there is at least one."""
    median = statistics.median(values)
    if len(values) < 2:
        return Figure(median)
    quarter, _, three_quarters = statistics.quantiles(values, n=4, method="inclusive")
    return Figure(median, (three_quarters - quarter) / median)


def repeated(measure: Callable[[], float], budget: float) -> Figure:
    """Return the figure of what `measure` returns, after a call that warms up.

    It is called for about `budget` seconds: at least three times, at most 25 times.
    """
    measure()
    values = list[float]()
    end = time.perf_counter() + budget
    while len(values) < _FEWEST or (len(values) < _MOST and time.perf_counter() < end):
        values.append(measure())
    return figure(values)


def seconds(device: torch.device, call: Callable[[], object]) -> float:
    """Return the seconds of a call, until the device has done its work."""
    wait(device)
    began = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - began


def wait(device: torch.device) -> None:
    """Return once the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def threads_of_torch(threads: int) -> Generator[None]:
    """Let torch use this number of threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""The clock and the memory of measured steps, the same for every implementation, on a GPU or without one."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ktc.tools.bench.finetune.request import Request


def synchronise() -> None:
    """Wait for the work of all GPUs."""
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)


def reset_peaks() -> None:
    """Free cached GPU memory and begin new peaks."""
    torch.cuda.empty_cache()
    for device in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(device)


def peaks() -> tuple[int, int]:
    """Return the peak bytes allocated and reserved since `reset_peaks`, over all GPUs."""
    devices = range(torch.cuda.device_count())
    allocated, reserved = (
        map(each, devices) for each in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)
    )
    return sum(allocated), sum(reserved)


def host_peak() -> int:
    """Return the peak bytes of this process in host memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def token_ids(request: Request, vocabulary: int) -> Tensor:
    """Return the tokens of all steps: int64 (steps * accumulation, length), the same for every implementation."""
    generator = torch.Generator().manual_seed(request.seed)
    return torch.randint(vocabulary, (request.steps * request.accumulation, request.length), generator=generator)


@dataclass(slots=True)
class StepClock:
    """The seconds of consecutive steps, each until the GPUs have done its work."""

    seconds: list[float] = field(default_factory=list[float])
    _last: float = 0.0

    def start(self) -> None:
        """Begin a step: the first, or one after a pause."""
        synchronise()
        self._last = time.perf_counter()

    def step(self) -> None:
        """End a step and begin the next."""
        synchronise()
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now

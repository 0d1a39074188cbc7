"""The machine of a run, as the reports show it, and the peaks of its memory."""

from __future__ import annotations

import platform
import resource
from importlib.metadata import version
from typing import Any

import torch

from ktc.foundation import host
from ktc.tools.bench.rounds import clock_of


def machine(*packages: str) -> dict[str, str]:
    """Return processor, cores, instruction set, GPUs, and the versions of torch, transformers and `packages`."""
    here = host.detect()
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "cpu": host.cpu_name(),
        "cores": str(here.cores),
        "isa": here.isas[0],
        "gpus": ", ".join(gpus),
        **{name: version(name) for name in ("torch", "transformers", *packages)},
    }


def processor(isa: Any, threads: int, *packages: str) -> dict[str, Any]:
    """Return the machine of figures of the CPU: instruction sets, threads and their clock, and versions."""
    return {
        "cpu": host.cpu_name(),
        "cores": host.detect().cores,
        "isa": isa,
        "threads": threads,
        "clock": clock_of(threads),
        **{name: version(name) for name in ("torch", "transformers", *packages)},
        "python": platform.python_version(),
    }


def reset_peaks() -> None:
    """Free cached GPU memory and begin new peaks."""
    torch.cuda.empty_cache()
    for device in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(device)


def peaks() -> tuple[int, int]:
    """Return the peak bytes allocated and reserved since `reset_peaks`, over all GPUs."""
    devices = range(torch.cuda.device_count())
    return (
        sum(map(torch.cuda.max_memory_allocated, devices)),
        sum(map(torch.cuda.max_memory_reserved, devices)),
    )


def host_peak() -> int:
    """Return the peak bytes of this process in host memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

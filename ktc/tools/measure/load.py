"""Other programs on this machine: how much of the processor they use before a measurement."""

from __future__ import annotations

import os
from typing import Final

import psutil

_INTERVAL: Final = 1.0  # seconds
MOST_LOAD: Final = 0.15  # of the processor, by other programs: more makes the machine busy
MOST_SPREAD: Final = 0.2  # of the median of all spreads


def load() -> float:
    """Return the share of this process's CPUs that is in use, over a second in which it sleeps itself."""
    shares = psutil.cpu_percent(_INTERVAL, percpu=True)
    usable = os.sched_getaffinity(0)
    of_ours = [share for cpu, share in enumerate(shares) if cpu in usable] or shares
    return sum(of_ours) / len(of_ours) / 100

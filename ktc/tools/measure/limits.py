"""The limits of the processor: multiply-adds on registers alone, and sequential reads of memory.

In: an instruction set and a number of threads. Out: GFLOP/s and GB/s by the clock that candidates are measured with.
The loops are `runtime/include/ktc/machine_peak.hpp`, compiled here in about a second.
"""

from __future__ import annotations

import ctypes
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ktc.foundation import host, resources
from ktc.foundation.isa import INSTRUCTION_SETS, Isa
from ktc.model.experts.layouts.packed import huge_pages
from ktc.stages.codegen import toolchain

# About 30 ms: long against a tick of the scheduler, short against a round.
_ROUNDS: Final = 2_000_000
_MIN_READ: Final = 512 * 2**20
_PIECE: Final = 512  # bytes that `read_in_order` takes at once


def build_library(isa: Isa, folder: Path) -> Path:
    """Compile the two loops for `isa` into `folder`. Raises what `toolchain` raises."""
    tools = toolchain.find(host.detect())
    source = resources.runtime_sources() / "machine_peak.cpp"
    built, library = folder / "machine_peak.o", folder / "machine_peak.so"
    contract = () if INSTRUCTION_SETS[isa].bf16_products else ("-ffp-contract=fast",)
    toolchain.run((*tools.compile_command(source, built, isa), *contract))
    toolchain.run(tools.link_command((built,), library))
    return library


@dataclass(slots=True)
class Samples:
    """The limits as they were at each moment they were measured."""

    gflops: list[float] = field(default_factory=list[float])
    gbps: list[float] = field(default_factory=list[float])

    def extend(self, more: Samples) -> None:
        """Add those of another list."""
        self.gflops += more.gflops
        self.gbps += more.gbps

    def median(self) -> tuple[float, float]:
        """GFLOP/s and GB/s."""
        return statistics.median(self.gflops), statistics.median(self.gbps)


class Limits:
    """The two limits of `threads` threads, measured at each call.

    The threads run on `cpus`, where these are named. `like` has memory to read, which is not allocated again.
    """

    def __init__(
        self, library: Path, threads: int, *, cpus: Sequence[int] = (), like: Limits | None = None, wall: bool = False
    ) -> None:
        """`wall` measures one thread by the clock on the wall too."""
        self.library = library
        self._native = ctypes.CDLL(str(library))
        self._native.multiply_in_registers.restype = ctypes.c_int64
        self._clock = time.process_time if threads == 1 and not wall else time.perf_counter
        self._pool = ThreadPoolExecutor(threads, initializer=_run_on, initargs=(cpus,))
        self._threads = threads
        part = max(_MIN_READ, 3 * _last_level_cache()) // threads // _PIECE * _PIECE
        self._memory = huge_pages(threads * part) if like is None else like._memory
        if like is None:
            _ = [*self._pool.map(self._touch, range(threads))]

    @property
    def read_bytes(self) -> int:
        """The bytes that one measurement reads, more than caches hold."""
        return self._part * self._threads

    def measure(self, samples: Samples) -> None:
        """Add one measurement of both."""
        samples.gflops.append(self._flops() / 1e9)
        samples.gbps.append(self.read() / 1e9)

    def read(self) -> float:
        """Return the bytes that the threads read per second, of one measurement."""

        def read(thread: int) -> int:
            address = ctypes.c_void_p(self._memory.data_ptr() + thread * self._part)
            self._native.read_in_order(address, ctypes.c_size_t(self._part))
            return self._part

        return self._per_second(read)

    @property
    def _part(self) -> int:
        """The bytes of one thread."""
        return self._memory.numel() // self._threads // _PIECE * _PIECE

    def _touch(self, thread: int) -> None:
        """Write a thread's part, which is in the memory of the thread's NUMA node then."""
        self._memory[thread * self._part : (thread + 1) * self._part].fill_(1)

    def _flops(self) -> float:
        def multiply(_: int) -> int:
            return self._native.multiply_in_registers(ctypes.c_int64(_ROUNDS))

        return self._per_second(multiply)

    def _per_second(self, work: Callable[[int], int]) -> float:
        begin = self._clock()
        done = sum(self._pool.map(work, range(self._threads)))
        return done / (self._clock() - begin)


def _run_on(cpus: Sequence[int]) -> None:
    """Keep the calling thread on these CPUs, on any of the process if none is named."""
    if cpus:
        os.sched_setaffinity(0, cpus)


def _last_level_cache() -> int:
    """Return the bytes, 0 if the system does not report them."""
    sizes = (path.read_text() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    matches = (re.fullmatch(r"(\d+)K", size.strip()) for size in sizes)
    return max((int(size[1]) * 1024 for size in matches if size), default=0)

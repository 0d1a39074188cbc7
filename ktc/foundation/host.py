"""The machine: its kernels' instruction sets, cores, memory and compiler.

`detect` reads this machine; `host_file` reads the description of another one. Plan and codegen use a `Host`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ktc.diagnostics import Diagnostic, HostLacks, InputRefused, listing
from ktc.foundation import environment
from ktc.foundation.assumed_rates import assumed_rates
from ktc.foundation.isa import INSTRUCTION_SETS, PREFERENCE, Isa, isa_of
from ktc.foundation.rates import Rates

_NODES = Path("/sys/devices/system/node")
_CONTEXT_BYTES = 1 << 30  # at least what CUDA and its libraries take of a GPU in a process
_ARCH_PRCTL, _ARCH_GET_XCOMP_SUPP, _XFEATURE_XTILEDATA = 158, 0x1021, 18


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: its `memory` in bytes, of which `taken` are other programs'."""

    name: str
    memory: int
    taken: int = 0

    @property
    def free(self) -> int:
        """The bytes that ktc may use, with CUDA's context."""
        return self.memory - self.taken


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A NUMA node: its number, and those of its CPUs that this process may use."""

    number: int
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler: its absolute path and the version it reports (`12.2.0`)."""

    path: str
    version: str


@dataclass(frozen=True, slots=True)
class Host:
    """A machine for plan and codegen.

    `isas` are the usable kernel instruction sets, best first, `scalar` always last; `features` the CPU flags with
    Linux's names; `cores` physical cores and `threads` hardware threads that this process may use; `memory` in bytes,
    within the container's limits. `processor` is Linux's name of it, empty if unknown. `described` are its rates by a
    measurement or a file, None where none is known. `notes` are warnings about them, which a plan repeats.
    """

    isas: tuple[Isa, ...]
    features: frozenset[str]
    cores: int
    threads: int
    numa: int
    memory: int
    gpus: tuple[Gpu, ...]
    python_abi: str
    compiler: Compiler | None
    described: Rates | None = None
    processor: str = ""
    notes: tuple[Diagnostic, ...] = ()

    @property
    def rates(self) -> Rates:
        """Its rates: those that are known, otherwise those usual of such a machine."""
        if self.described is not None:
            return self.described
        gpus = [gpu.name for gpu in self.gpus]
        return assumed_rates(self.isas[0], self.cores, self.numa, gpus, self.processor)

    def part(self, processes: int) -> Host:
        """Return what one of several processes has: its part of cores and memory, and the first GPU."""
        cores, threads = (max(1, number // processes) for number in (self.cores, self.threads))
        return replace(self, cores=cores, threads=threads, memory=self.memory // processes, gpus=self.gpus[:1])

    @property
    def workers(self) -> int:
        """Threads of a kernel's engine where a rule does not say how many: one per core that this process may use."""
        return max(1, min(self.cores, self.threads))


def detect(probe_gpu: bool = False) -> Host:
    """Return this machine. GPUs are listed only if `probe_gpu`, since that imports torch (seconds)."""
    features = _cpu_features()
    threads = usable_threads()
    return Host(
        isas=usable_isas(features, amx_permitted=_kernel_supports_amx()),
        features=features,
        cores=min(_physical_cores(_own_cpus()), threads),
        threads=threads,
        numa=len(list(_NODES.glob("node[0-9]*"))) or 1,
        memory=total_memory(),
        gpus=_gpus() if probe_gpu else (),
        python_abi=str(sysconfig.get_config_var("SOABI")),
        compiler=find_compiler(),
        processor=cpu_name(),
    )


def usable_isas(features: frozenset[str], amx_permitted: bool = True) -> tuple[Isa, ...]:
    """Return the kernel instruction sets of a CPU with these flags, best first.

    Linux lists a vector flag only if the kernel saves its registers, so the flags suffice; AMX also needs the kernel's
    permission.
    """
    rows = (row for row in map(INSTRUCTION_SETS.__getitem__, PREFERENCE) if amx_permitted or not row.tiles)
    return tuple(row.name for row in rows if row.cpu <= features)


def restrict(host: Host, isa: str) -> Host:
    """Return the host with `isa` as its best instruction set.

    Raises `InputRefused` (H211) for an unknown instruction set, `HostLacks` (H210) if the host cannot run it.
    """
    usable = f"usable here: {listing(host.isas)}"
    wanted = isa_of(isa)
    if wanted is None:
        raise InputRefused(Diagnostic("H211", f"unknown instruction set `{isa}`", hint=usable))
    if wanted not in host.isas:
        lacking = sorted(INSTRUCTION_SETS[wanted].cpu - host.features)
        missing = listing(lacking) if lacking else "the kernel's permission"
        raise HostLacks(Diagnostic("H210", f"this machine cannot run `{isa}` kernels: it lacks {missing}", hint=usable))
    restricted = replace(host, isas=host.isas[host.isas.index(wanted) :])
    if host.described is None or wanted == host.isas[0]:
        return restricted
    usual = replace(restricted, described=None).rates.cpu.products  # the known ones are of the best instruction set
    return replace(restricted, described=replace(host.described, cpu=replace(host.described.cpu, products=usual)))


def find_compiler() -> Compiler | None:
    """Return the C++ compiler: `$CXX`, otherwise the first working one of g++, c++, clang++ on the path."""
    for name in filter(None, (environment.cxx(), "g++", "c++", "clang++")):
        path = shutil.which(name)
        version = _answer(path, "-dumpfullversion", "-dumpversion") if path else ""
        if path and version:
            return Compiler(path, version)
    return None


# Reading this machine


def usable_threads() -> int:
    """Return the number of usable threads: the CPUs of this process, or the container's quota if less."""
    cpus = len(_own_cpus())
    return max(1, min(cpus, _cgroup_cpus() or cpus))


def total_memory() -> int:
    """Return the bytes of the machine's memory, at most the limit of the container."""
    return min(limit for limit in (_physical_memory(), _cgroup_memory()) if limit is not None)


def available_memory() -> int:
    """Return the bytes that new processes can use: free memory and caches, at most the limit of the container."""
    lines = (line.split() for line in _read("/proc/meminfo").splitlines())
    free = next((int(line[1]) << 10 for line in lines if line[0] == "MemAvailable:"), _physical_memory())
    return min(free, _cgroup_memory() or free)


def cpu_name() -> str:
    """Return Linux's name of the processor, otherwise the architecture."""
    name = re.search(r"^model name\s*:\s*(.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return name[1] if name else platform.machine()


def numa_nodes() -> tuple[NumaNode, ...]:
    """Return the NUMA nodes that this process may run on; empty if the system does not list them."""
    usable, nodes = _own_cpus(), list[NumaNode]()
    for folder in sorted(_NODES.glob("node[0-9]*"), key=lambda folder: int(folder.name[4:])):
        cpus = tuple(cpu for cpu in _listed(_read(folder / "cpulist")) if cpu in usable)
        if cpus:
            nodes.append(NumaNode(int(folder.name[4:]), cpus))
    return tuple(nodes)


def _listed(text: str) -> Iterator[int]:
    """Yield the numbers of a list in Linux's format: `0-3,8`."""
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        yield from range(int(first), int(last or first) + 1)


def _own_cpus() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _cpu_features() -> frozenset[str]:
    flags = re.search(r"^flags\s*:(.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return frozenset(flags[1].split()) if flags else frozenset()


def _kernel_supports_amx() -> bool:
    """Return whether the kernel permits the AMX tile registers, without requesting them."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    supported = ctypes.c_uint64(0)
    status = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_GET_XCOMP_SUPP, ctypes.byref(supported))
    return status == 0 and bool(supported.value >> _XFEATURE_XTILEDATA & 1)


def _physical_cores(cpus: set[int]) -> int:
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    siblings = {_read(topology.format(cpu)) or str(cpu) for cpu in cpus}
    return max(1, len(siblings))


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_cpus() -> int | None:
    """Return the CPU quota of the container in whole processors, rounded up; `None` without one."""
    limits = [_read(folder / "cpu.max").split() for folder in _control_groups("cpu")]
    limits += [
        [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")] for folder in _control_groups("cpu")
    ]
    numbers = [(int(limit[0]), int(limit[1])) for limit in limits if len(limit) == 2 and all(map(str.isdigit, limit))]
    return min((-(-quota // period) for quota, period in numbers if period), default=None)


def _cgroup_memory() -> int | None:
    files = ("memory.max", "memory.limit_in_bytes")
    limits = (_read(folder / file) for folder in _control_groups("memory") for file in files)
    return min((int(limit) for limit in limits if limit.isdigit()), default=None)


def _control_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and of all groups above it, for versions 1 and 2."""
    for entry in _read("/proc/self/cgroup").splitlines():
        _, controllers, inside = entry.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup") / (controller if controllers else "")
        group = root / inside.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(root))


def _gpus() -> tuple[Gpu, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    return tuple(_gpu(torch.cuda.get_device_properties(index), index) for index in range(torch.cuda.device_count()))


def _gpu(properties: Any, index: int) -> Gpu:
    """Return a GPU. Of several processes each would count the others, and plan something else: none counts any."""
    import torch

    memory = int(properties.total_memory)
    if environment.world_size() > 1:
        return Gpu(str(properties.name), memory)
    try:
        free = torch.cuda.mem_get_info(index)[0] + torch.cuda.memory_reserved(index)
    except RuntimeError:  # no memory for a context
        free = 0
    return Gpu(str(properties.name), memory, taken_of(memory, free))


def taken_of(memory: int, free: int) -> int:
    """Return the bytes of a GPU that other programs have, 0 for no more than a context's.

    Free bytes are rounded down, by an eighth of them and a sixteenth of the GPU at most. So a plan made again a minute
    later is the same.
    """
    if memory - free <= _CONTEXT_BYTES:
        return 0
    step = max(1, min(memory // 16, 1 << max(0, (free // 8).bit_length() - 1)))
    return memory - free // step * step


def _answer(program: str, *arguments: str) -> str:
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.split()[0] if done.returncode == 0 and done.stdout.split() else ""


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""

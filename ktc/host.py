"""The machine: which kernels it can run, its cores, memory and compiler; and ktc's environment variables.

`detect` reads this machine, `read_host_file` a TOML description of another one (faulty files are refused as a whole).
A `Host` is what plan and codegen see; with `cli` this is the only module that reads the environment.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import socket
import subprocess
import sysconfig
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

from ktc.diagnostics import Diagnostic, HostLacks, InputRefused, Span

Isa = Literal["scalar", "avx2", "avx512", "avx512_bf16", "amx"]
T = TypeVar("T")

# The best one first. Each implies those after it.
_PREFERENCE = cast("tuple[Isa, ...]", tuple(reversed(get_args(Isa))))
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"})
# Every CPU with bf16 products has VNNI, for products of integers, and AMX likewise; a virtual machine may hide one.
_NEEDS: dict[Isa, frozenset[str]] = {
    "scalar": frozenset(),
    "avx2": frozenset({"avx2", "fma"}),
    "avx512": _AVX512,
    "avx512_bf16": _AVX512 | {"avx512_bf16", "avx512_vnni"},
    "amx": _AVX512 | {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"},
}
_NODES = Path("/sys/devices/system/node")
_ARCH_PRCTL, _ARCH_GET_XCOMP_SUPP, _XFEATURE_XTILEDATA = 158, 0x1021, 18
_BYTE_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("iB", 1024), ("B", 1000))
    for power, prefix in enumerate("KMGT", start=1)
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; `memory` in bytes."""

    name: str
    memory: int


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A part of the machine whose memory is near to its CPUs: its number, and those that this process may use."""

    number: int
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler: its absolute path and the version it reports (`12.2.0`)."""

    path: str
    version: str


@dataclass(frozen=True, slots=True)
class Host:
    """A machine as plan and codegen see it.

    `isas` are the usable kernel instruction sets, best first, `scalar` always last; `features` the CPU's flags as Linux
    names them; `cores` physical cores and `threads` hardware threads that this process may use; `memory` in bytes,
    container limits included.
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


def detect(probe_gpu: bool = False) -> Host:
    """This machine. GPUs are listed only if `probe_gpu`, since that imports torch (seconds)."""
    features = _cpu_features()
    threads = usable_threads()
    return Host(
        isas=usable_isas(features, amx_permitted=_kernel_supports_amx()),
        features=features,
        cores=min(_physical_cores(_own_cpus()), threads),
        threads=threads,
        numa=len(list(_NODES.glob("node[0-9]*"))) or 1,
        memory=min(limit for limit in (_physical_memory(), _cgroup_memory()) if limit is not None),
        gpus=_gpus() if probe_gpu else (),
        python_abi=str(sysconfig.get_config_var("SOABI")),
        compiler=find_compiler(),
    )


def usable_isas(features: frozenset[str], amx_permitted: bool = True) -> tuple[Isa, ...]:
    """The kernel instruction sets that a CPU with these flags runs, best first. Linux lists a vector flag only if the
    kernel saves its registers, so the flags are enough; AMX needs the kernel's consent besides."""
    return tuple(isa for isa in _PREFERENCE if _NEEDS[isa] <= features and (isa != "amx" or amx_permitted))


def restrict(host: Host, isa: str) -> Host:
    """The host with `isa` as its best instruction set. Raises `InputRefused` (H211) if there is no such set,
    `HostLacks` (H210) if the host cannot run it."""
    usable = "usable here: " + ", ".join(f"`{name}`" for name in host.isas)
    wanted = _isa(isa)
    if wanted is None:
        raise InputRefused(Diagnostic("H211", f"unknown instruction set `{isa}`", hint=usable))
    if wanted not in host.isas:
        missing = ", ".join(f"`{flag}`" for flag in sorted(_NEEDS[wanted] - host.features)) or "the kernel's consent"
        raise HostLacks(Diagnostic("H210", f"this machine cannot run `{isa}` kernels: it lacks {missing}", hint=usable))
    return replace(host, isas=host.isas[host.isas.index(wanted) :])


def find_compiler() -> Compiler | None:
    """The C++ compiler: `$CXX`, else the first of g++, c++, clang++ on the path that answers."""
    for name in filter(None, (os.environ.get("CXX"), "g++", "c++", "clang++")):
        path = shutil.which(name)
        version = _answer(path, "-dumpfullversion", "-dumpversion") if path else ""
        if path and version:
            return Compiler(path, version)
    return None


# The environment


def cache_dir() -> Path:
    """Where built kernels and `tiny:` models lie: `$KTC_CACHE_DIR`, `$XDG_CACHE_HOME/ktc` or `~/.cache/ktc`."""
    if own := os.environ.get("KTC_CACHE_DIR"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ktc"


def local_world_size() -> int:
    """How many processes of one torchrun share this machine (1 without torchrun)."""
    return _number("LOCAL_WORLD_SIZE")


def world_size() -> int:
    """How many processes the torchrun has that started this one (1 without torchrun)."""
    return _number("WORLD_SIZE")


def asked_processes() -> int:
    """How many processes LLaMA-Factory's launcher would start: `NPROC_PER_NODE` on each of `NNODES`."""
    return _number("NPROC_PER_NODE") * _number("NNODES")


def _number(variable: str) -> int:
    value = os.environ.get(variable, "1")
    return max(1, int(value)) if value.isdigit() else 1


# `USE_KT`: the one switch for programs of others that run a compiled model


def use_kt() -> bool:
    """Whether `USE_KT` is on: `1`, `true` or `y`, as LLaMA-Factory reads it."""
    return os.environ.get("USE_KT", "0").lower() in ("1", "true", "y")


def switch_on_kt() -> None:
    """As if this process had been started under `USE_KT=1`."""
    os.environ["USE_KT"] = "1"


def apply_use_kt() -> None:
    """Under `USE_KT=1` accelerate shall not judge the device map of a compiled model: called where one is loaded.

    It refuses a map of several devices in a process group, and would tell DDP to move the model to one. What the user
    has set himself stays.
    """
    if use_kt():
        os.environ.setdefault("ACCELERATE_BYPASS_DEVICE_MAP", "true")


def join_world_of_one() -> None:
    """Outside torchrun: what torchrun tells the one process of `--nproc-per-node 1`.

    In a process group transformers counts one GPU per process and wraps nothing in DataParallel, however many it sees.
    """
    if "WORLD_SIZE" in os.environ:
        return
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(alone, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)


def process_rank() -> int:
    """Which of the processes that torchrun started this one is, over all machines; 0 without it."""
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0


# A machine described by a file


def read_host_file(path: str | Path) -> Host:
    """The machine that a TOML file describes: `isa`, `cores`, `numa`, `memory` (bytes or `"512GiB"`), `[[gpu]] memory`.

    What the file leaves out is taken from this machine, except GPUs: none are assumed.
    Raises `InputRefused` with every fault of the file (H200 unreadable, H201 no TOML, H202 key, H203 value).
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputRefused(Diagnostic("H200", f"cannot read the host file `{path}`: {error}")) from error
    try:
        entries = cast("dict[str, object]", tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        fault = Diagnostic("H201", f"the host file is no TOML: {error}", _toml_place(path, str(error)))
        raise InputRefused(fault, sources={str(path): text}) from error
    return _HostFile(str(path), text).read(entries, detect())


class _HostFile:
    """Checks the entries of a host file, keeping all faults until the end."""

    def __init__(self, path: str, text: str) -> None:
        self._path, self._text = path, text
        self._faults: list[Diagnostic] = []

    def read(self, entries: Mapping[str, object], here: Host) -> Host:
        self._refuse_unknown(entries, ("isa", "cores", "numa", "memory", "gpu"))
        isa = self._value(entries, "isa", _isa, f"one of {', '.join(_PREFERENCE)}")
        cores = self._value(entries, "cores", _count, "a count above zero")
        numa = self._value(entries, "numa", _count, "a count above zero")
        memory = self._value(entries, "memory", parse_bytes, 'a size such as "512GiB"')
        gpus = self._gpus(entries.get("gpu", []))
        if self._faults:
            raise InputRefused(*self._faults, sources={self._path: self._text})
        host = replace(here, gpus=gpus, memory=memory or here.memory, numa=numa or here.numa)
        if cores:
            host = replace(host, cores=cores, threads=cores)
        if isa:
            isas = _PREFERENCE[_PREFERENCE.index(isa) :]
            host = replace(host, isas=isas, features=frozenset[str]().union(*(_NEEDS[each] for each in isas)))
        return host

    def _gpus(self, tables: object) -> tuple[Gpu, ...]:
        if not isinstance(tables, list):
            self._fault("H203", "gpu", "`gpu` must be written as `[[gpu]]` tables")
            return ()
        gpus: list[Gpu] = []
        for number, table in enumerate(cast("list[dict[str, object]]", tables)):
            self._refuse_unknown(table, ("name", "memory"))
            memory = self._value(table, "memory", parse_bytes, 'a size such as "24GiB"')
            if memory is None and "memory" not in table:
                self._fault("H203", "[[gpu]]", "a `[[gpu]]` table must say its `memory`")
            gpus.append(Gpu(str(table.get("name", f"gpu {number}")), memory or 0))
        return tuple(gpus)

    def _refuse_unknown(self, entries: Mapping[str, object], known: tuple[str, ...]) -> None:
        for key in entries:
            if key not in known:
                self._fault("H202", key, f"unknown key `{key}`: expected one of {', '.join(known)}")

    def _value(
        self, entries: Mapping[str, object], key: str, convert: Callable[[object], T | None], what: str
    ) -> T | None:
        value = convert(entries[key]) if key in entries else None
        if key in entries and value is None:
            self._fault("H203", key, f"`{key}` must be {what}, found `{entries[key]}`")
        return value

    def _fault(self, code: str, key: str, message: str) -> None:
        found = re.search(rf"^[ \t]*({re.escape(key)})", self._text, re.MULTILINE)
        start = found.start(1) if found else 0
        line = self._text.count("\n", 0, start) + 1
        column = start - (self._text.rfind("\n", 0, start) + 1) + 1
        self._faults.append(Diagnostic(code, message, Span(self._path, line, column, line, column + len(key))))


def parse_bytes(value: object) -> int | None:
    """A size in bytes from `1024`, `"64GiB"` or `"1.5 TB"`; `None` if it is no size."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?(?:iB|B)?)", str(value).strip())
    if not found or found[2] not in _BYTE_UNITS:
        return None
    return int(float(found[1]) * _BYTE_UNITS[found[2]]) or None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _isa(value: object) -> Isa | None:
    return next((isa for isa in _PREFERENCE if isa == value), None)


def _toml_place(path: str | Path, message: str) -> Span | None:
    found = re.search(r"at line (\d+), column (\d+)", message)
    if not found:
        return None
    line, column = int(found[1]), int(found[2])
    return Span(str(path), line, column, line, column + 1)


# Reading this machine


def usable_threads() -> int:
    """How many threads this process can run at once: the CPUs it may use, or the quota of its container if less."""
    cpus = len(_own_cpus())
    return max(1, min(cpus, _cgroup_cpus() or cpus))


def cpu_name() -> str:
    """The processor as Linux names it, else the architecture."""
    found = re.search(r"^model name\s*:\s*(.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return found[1] if found else platform.machine()


def numa_nodes() -> tuple[NumaNode, ...]:
    """The NUMA nodes that this process may run on; none where the system does not name them."""
    own, found = _own_cpus(), list[NumaNode]()
    for folder in sorted(_NODES.glob("node[0-9]*"), key=lambda folder: int(folder.name[4:])):
        cpus = tuple(cpu for cpu in _listed(_read(folder / "cpulist")) if cpu in own)
        if cpus:
            found.append(NumaNode(int(folder.name[4:]), cpus))
    return tuple(found)


def _listed(text: str) -> Iterator[int]:
    """The numbers of a list as Linux writes them: `0-3,8`."""
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        yield from range(int(first), int(last or first) + 1)


def _own_cpus() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _cpu_features() -> frozenset[str]:
    found = re.search(r"^flags\s*:(.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def _kernel_supports_amx() -> bool:
    """Whether the kernel would grant this process the AMX tile registers, asked without requesting them."""
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
    """The CPU quota of the container in whole processors, rounded up; `None` without one."""
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
    """The folders of this process's control group and of all groups above it, version 1 and 2 alike."""
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
    devices: list[Any] = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(Gpu(str(device.name), int(device.total_memory)) for device in devices)


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

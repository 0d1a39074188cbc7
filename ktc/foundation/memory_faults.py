"""Too little memory or too few threads, distinguished from bugs: the sizes requested, free and in use.

In: an exception of Python, of a kernel, or of torch on the host or on a GPU. Out: a diagnostic with the numbers, or
None. Nothing is imported for it: a process without memory could not. An exception that reaches a caller leaves kernels
and models usable: a smaller call has the same result as before.
"""

from __future__ import annotations

import errno
import re
import resource
from pathlib import Path
from typing import Final

from ktc.diagnostics import Diagnostic, causes
from ktc.foundation import host

_BYTES: Final = re.compile(r"(?:allocate|mmap) ([\d,]+) bytes")
_NO_MEMORY: Final = re.compile(
    r"an(?:no|')t allocate memory|std::bad_alloc|not enough memory|out of memory"
    r"|failed to map segment from shared object(?!: Operation)",
    re.IGNORECASE,
)
_NO_THREAD: Final = re.compile(
    r"can't start new thread|kernel threads could be started|thread creation failed", re.IGNORECASE
)
_ON_GPU: Final = re.compile(r"\b(?:CUDA|HIP|GPU|XPU|cublas|cudnn)", re.IGNORECASE)
_SIZE: Final = r"([\d.]+ (?:[KMGT]i?B|bytes))"
_GPU_NUMBERS: Final = (
    ("requested", re.compile(f"Tried to allocate {_SIZE}")),
    ("free", re.compile(f"of which {_SIZE} is free")),
    ("in all", re.compile(f"total capacity of {_SIZE}")),
    ("held by this process", re.compile(f"this process has {_SIZE} memory in use")),
    ("by tensors", re.compile(f"{_SIZE} is allocated by PyTorch")),
)
_HOST_REMEDY: Final = "fewer tokens or sequences at once, a smaller model or format, or end other programs"
_GPU_REMEDY: Final = "fewer tokens or sequences at once, experts on the CPU, or end other programs on the GPU"


def memory_fault(error: BaseException) -> Diagnostic | None:
    """Return what to tell the user: U115 host memory, U116 a GPU's, U117 threads; None for any other error."""
    for cause in causes(error):
        text = str(cause)
        if _NO_THREAD.search(text):
            return Diagnostic("U117", f"the system starts no more threads: {text}", hint="raise the limit: `ulimit -u`")
        if type(cause).__name__ == "OutOfMemoryError" or (_NO_MEMORY.search(text) and _ON_GPU.search(text)):
            return _of_gpu(text)
        if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM):
            return _of_host(text)
        if isinstance(cause, RuntimeError | OSError | ImportError) and _NO_MEMORY.search(text):
            return _of_host(text)
    return None


def _of_host(text: str) -> Diagnostic:
    requested_bytes = _BYTES.search(text)
    requested = f"{_size(int(requested_bytes[1].replace(',', '')))} requested, " if requested_bytes else ""
    free, resident = _free(), _status("VmRSS:")
    numbers = f"{requested}{_size(free)} free, {_size(resident)} held by this process"
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        numbers += f", whose address space is limited to {_size(limit)} (`ulimit -v`)"
    return Diagnostic("U115", f"too little memory on the host: {numbers}", hint=_HOST_REMEDY)


def _of_gpu(text: str) -> Diagnostic:
    numbers_found = [(name, match[1]) for name, pattern in _GPU_NUMBERS if (match := pattern.search(text))]
    numbers = ", ".join(f"{size} {name}" for name, size in numbers_found) or text.splitlines()[0]
    return Diagnostic("U116", f"too little memory on the GPU: {numbers}", hint=_GPU_REMEDY)


def _free() -> int:
    """Count the bytes that this process can still map: of the machine, and of its own limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    left = host.available_memory()
    return left if limit == resource.RLIM_INFINITY else max(0, min(left, limit - _status("VmSize:")))


def _status(name: str) -> int:
    lines = (line.split() for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    return next((int(line[1]) << 10 for line in lines if line and line[0] == name), 0)


def _size(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"

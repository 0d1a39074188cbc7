"""The OpenMP runtime that PyTorch runs on: the functions by which a kernel library calls on its threads.

Its threads spin for milliseconds after each of PyTorch's operations. Kernels with threads of their own wait for the
cores; on the same threads they start at once.

A forked child has the runtime's memory and none of its threads, and GCC's runtime waits for them for ever. So kernels
take their own threads there, and PyTorch's operations run on one.
"""

from __future__ import annotations

import ctypes
import functools
import os
from contextlib import suppress
from pathlib import Path
from typing import Final, cast

import torch

Functions = tuple[int, int, int, int]
# In the order of `ktc::OpenMp`. LLVM's and Intel's runtimes have GCC's entry point too.
_NAMES: Final = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "omp_get_max_threads")
NONE: Final = (0, 0, 0, 0)
_PROCESS: Final = os.getpid()


def _on_one_thread() -> None:
    """Let PyTorch's operations open no parallel region, as workers of its `DataLoader` do."""
    torch.set_num_threads(1)


os.register_at_fork(after_in_child=_on_one_thread)


def on_one_thread() -> None:
    """Let PyTorch's operations on this thread open no parallel region; other threads keep theirs."""
    torch.get_num_threads()  # a thread takes the process' number at its first question
    with suppress(OSError, AttributeError):
        _torch_library().omp_set_num_threads(1)


def functions() -> Functions:
    """Return the addresses of the runtime's functions; zeros if PyTorch has none, or another interface.

    Zeros too in a forked child: it has the runtime's memory and none of its threads.
    """
    return _found() if os.getpid() == _PROCESS else NONE


def _torch_library() -> ctypes.CDLL:
    """Return a library whose symbols are looked up in what it was linked with too."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


@functools.cache
def _found() -> Functions:
    try:
        loaded = _torch_library()
        addresses = tuple(ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0 for name in _NAMES)
    except (OSError, AttributeError):
        return NONE
    return cast("Functions", addresses) if all(addresses) else NONE

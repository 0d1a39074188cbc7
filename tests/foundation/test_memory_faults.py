"""Errors of other libraries that mean too little memory, with the numbers in them; others are not taken for it."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ktc.foundation.memory_faults import memory_fault

GPU = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 5.20 GiB is "
    "free. Including non-PyTorch memory, this process has 73.90 GiB memory in use. Of the allocated memory 70.01 GiB "
    "is allocated by PyTorch, and 1.20 GiB is reserved by PyTorch but unallocated."
)


class OutOfMemoryError(RuntimeError):
    """Torch's class by its name."""


def test_memory_of_a_gpu_is_told_with_its_numbers() -> None:
    found = memory_fault(OutOfMemoryError(GPU))
    assert found is not None and found.code == "U116"
    assert found.message == (
        "too little memory on the GPU: 20.00 GiB requested, 5.20 GiB free, 79.11 GiB in all, "
        "73.90 GiB held by this process, 70.01 GiB by tensors"
    )


@pytest.mark.parametrize(
    ("error", "requested"),
    [
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 419430400 bytes."),
            "400.0 MiB",
        ),
        (RuntimeError("unable to mmap 8589934592 bytes from file <x>: Cannot allocate memory (12)"), "8.0 GiB"),
        (MemoryError("cannot allocate 6,442,450,944 bytes for weights"), "6.0 GiB"),
        (MemoryError("std::bad_alloc"), ""),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), ""),
        (ImportError("libtorch_cpu.so: failed to map segment: Cannot allocate memory"), ""),
    ],
)
def test_memory_of_the_host_is_told_with_what_is_free(error: Exception, requested: str) -> None:
    found = memory_fault(error)
    assert found is not None and found.code == "U115" and found.hint
    start = f"{requested} requested, " if requested else ""
    assert found.message.startswith(f"too little memory on the host: {start}")
    assert " free, " in found.message and " held by this process" in found.message


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("can't start new thread"),
        RuntimeError("only 3 of 64 kernel threads could be started: Resource temporarily unavailable"),
    ],
)
def test_threads_that_do_not_start_are_told(error: Exception) -> None:
    found = memory_fault(error)
    assert found is not None and found.code == "U117" and str(error) in found.message


def test_a_cause_counts_and_other_errors_do_not() -> None:
    error = ValueError("a layer could not be loaded")
    error.__cause__ = MemoryError("std::bad_alloc")
    assert memory_fault(error) is not None
    for other in (ValueError("cannot allocate a name"), RuntimeError("CUDA error: device-side assert"), KeyError("x")):
        assert memory_fault(other) is None


@pytest.mark.slow
def test_a_command_in_a_small_address_space_ends_with_the_numbers(inference_twin: Callable[[str], Path]) -> None:
    command = [sys.executable, "-m", "ktc", "generate", str(inference_twin("qwen3_moe")), "--prompt", "hello"]
    command += ["--max-new-tokens", "3"]
    for mebibytes in (240, 600, 850):  # of Python and torch, of transformers, of the model

        def limited(size: int = mebibytes << 20) -> None:
            resource.setrlimit(resource.RLIMIT_AS, (size, size))

        done = subprocess.run(command, preexec_fn=limited, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 3, done.stderr[-2000:]
        assert "error[U115]: too little memory on the host: " in done.stderr and "bug" not in done.stderr
    assert subprocess.run(command, capture_output=True, timeout=300, check=False).returncode == 0

"""Calls that the machine has no memory for: an error with the numbers, and the module goes on as before."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from kernel_layers import ISAS, experts_of, random_layer, spec_of
from lora_layers import adapt, run_adapted

from ktc.diagnostics import Diagnostic
from ktc.foundation import memory_faults
from ktc.model.experts.layouts.stock_layout import canonical_parts
from ktc.model.kernels.kernel_library import KernelLibrary

SPEC = spec_of(ISAS[0])
MEBIBYTE = 1 << 20


@contextmanager
def room(size: int) -> Iterator[None]:
    """Limit this process's address space to what it has and `size` bytes more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory_faults._status("VmSize:") + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def error_of(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except (MemoryError, RuntimeError) as error:
        return error
    return None


def told(call: Callable[[], object]) -> Diagnostic | None:
    """What a user reads of a call's error."""
    error = error_of(call)
    found = error and memory_faults.memory_fault(error)
    assert found is not None or error is None, repr(error)
    return found


def observations(library: KernelLibrary) -> None:
    """Assert in a process of its own, whose address space is limited."""
    adapted = adapt(random_layer(64, 96, 4, 2, 9), 5)
    layer = adapted.layer
    module = experts_of(4, 64, 96, 2, layer.form, kernel=library.kernel(SPEC.entry))
    for name, tensor in layer.stock.items():
        for expert in range(4):
            for part, values in canonical_parts(layer.form, name, tensor[expert]):
                module.load_expert(expert, part, values)
    expected = run_adapted(module, adapted)
    large = 60_000
    x = torch.ones(large, 64, dtype=torch.bfloat16, requires_grad=True)
    index, weights = torch.zeros(large, 2, dtype=torch.int64), torch.ones(large, 2)

    def small_calls_are_right() -> bool:
        return all(map(torch.equal, run_adapted(module, adapted), expected))

    def forward() -> torch.Tensor:
        return module(x, index, weights)

    # Output, saved activations, the workspace: whichever of them finds no room first.
    causes = set[str]()
    for size in range(2, 1000, 20):
        with room(size * MEBIBYTE):
            found = told(forward)
            assert small_calls_are_right(), size
        if found is None:
            break
        assert found.code == "U115" and " free, " in found.message and "address space" in found.message, found
        causes.add(found.message.partition(" requested")[0])  # some allocations of C++ do not tell their size
    assert len(causes) >= 3, causes

    out = forward()
    wanted = torch.autograd.grad(out.sum(), x)[0]
    out = forward()
    with room(2 * MEBIBYTE):
        found = told(lambda: torch.autograd.grad(out.sum(), x))
        assert found is not None and found.code == "U115"
        assert small_calls_are_right()
    assert torch.equal(torch.autograd.grad(forward().sum(), x)[0], wanted), "the step can be repeated"
    with room(8 * MEBIBYTE):
        assert "for weights" in str(error_of(lambda: experts_of(64, 1024, 1024, 2, kernel=library.kernel(SPEC.entry))))


def test_a_call_without_memory_is_an_error_and_the_next_call_is_right(kernels: KernelLibrary) -> None:
    words = (str(kernels.path), kernels.digest, dict(kernels.entries)[SPEC.entry])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)  # freed memory goes back: no later call fits what one has left
    command = [sys.executable, __file__, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


if __name__ == "__main__":
    observations(KernelLibrary(Path(sys.argv[1]), sys.argv[2], ((SPEC.entry, sys.argv[3]),)))

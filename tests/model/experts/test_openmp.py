"""Calls of a kernel run on PyTorch's OpenMP threads where it has as many, and on the library's own elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from kernel_layers import ISAS, experts_of, random_layer, spec_of

from ktc.foundation import host
from ktc.model.experts.layouts.stock_layout import canonical_parts
from ktc.model.experts.module import FusedMoe
from ktc.model.kernels import openmp
from ktc.model.kernels.kernel_library import KernelLibrary

SPEC = spec_of(ISAS[0])


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def observations(library: KernelLibrary) -> None:
    """Assert in a process whose PyTorch has two threads: what this test is about depends on its environment."""
    host.usable_threads = lambda: 8
    layer = random_layer(64, 96, 4, 2, 9)
    x, index, weights = layer.x.bfloat16(), layer.index, layer.weights.float()

    def loaded(threads: int) -> FusedMoe:
        module = experts_of(4, 64, 96, 2, layer.form, kernel=library.kernel(SPEC.entry), threads=threads)
        for name, tensor in layer.stock.items():
            for expert in range(4):
                for part, values in canonical_parts(layer.form, name, tensor[expert]):
                    module.load_expert(expert, part, values)
        return module

    alone, two, four = loaded(1), loaded(2), loaded(4)
    expected = alone(x, index, weights)
    torch.randn(2, 100_000).mul(2)
    before = num_threads()
    for _ in range(20):
        assert torch.equal(two(x, index, weights), expected)
        torch.randn(2, 100_000).mul(2)
    assert num_threads() == before, "a call on two threads is on PyTorch's"
    assert torch.equal(four(x, index, weights), expected)
    assert num_threads() == before + 3, "PyTorch has too few for four, so they are the library's own"
    with ThreadPoolExecutor(2) as callers:
        for found in callers.map(lambda _: two(x, index, weights), range(8)):
            assert torch.equal(found, expected)
    child = os.fork()
    if child == 0:
        again = loaded(2)
        same = all(torch.equal(module(x, index, weights), expected) for module in (two, four, again))
        os._exit(0 if same and openmp.functions() == (0, 0, 0, 0) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "a child has none of the parent's threads"


def test_a_call_runs_on_the_threads_of_pytorch(kernels: KernelLibrary) -> None:
    if not all(openmp.functions()):
        pytest.skip("PyTorch is built without OpenMP")
    words = (str(kernels.path), kernels.digest, dict(kernels.entries)[SPEC.entry])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, __file__, *words], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


if __name__ == "__main__":
    observations(KernelLibrary(Path(sys.argv[1]), sys.argv[2], ((SPEC.entry, sys.argv[3]),)))

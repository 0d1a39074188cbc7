"""Kernels in forked children, by many Python threads at once, and in subinterpreters.

A child of a process that used them computes the same bits, and what PyTorch does around them does not wait for threads
of the parent. Calls of several threads take turns. A subinterpreter is refused by name.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from kernel_layers import ISAS, Layer, Load, experts_of, random_layer, spec_of
from lora_layers import adapt, run_adapted
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ktc.foundation import host
from ktc.model.experts.layouts.stock_layout import canonical_parts
from ktc.model.experts.module import FusedMoe
from ktc.model.kernels.kernel_library import KernelLibrary

SPEC = spec_of(ISAS[0])
PATIENCE = 300  # seconds; a child that waits for a thread of its parent takes for ever
Results = tuple[Tensor, ...]


def same(found: Results, expected: Results) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


# In a process whose PyTorch has two threads: a test's own process must not start them


class Rows(Dataset[int]):
    """Items that a worker of a `DataLoader` computes with the parent's module: 1 for the expected results."""

    def __init__(self, check: Callable[[], bool]) -> None:
        self._check = check

    def __len__(self) -> int:
        return 4

    def __getitem__(self, _: int) -> int:
        return int(self._check())


def observations(library: KernelLibrary) -> None:
    """Assert what forked children compute, after this process has used its kernels and PyTorch on two threads."""
    host.usable_threads = lambda: 8
    adapted = adapt(random_layer(64, 96, 4, 2, 9), 5)
    layer = adapted.layer
    modules = [loaded(library, layer, threads) for threads in (1, 2, 4)]
    expected = run_adapted(modules[0], adapted)
    large = torch.linspace(-1, 1, 300_000)
    exponentials = large.exp()

    def agrees() -> bool:
        signal.alarm(PATIENCE)
        computed = all(same(run_adapted(module, adapted), expected) for module in modules)
        computed = computed and torch.equal(large.exp(), exponentials)
        signal.alarm(0)
        return computed

    assert agrees()
    child = os.fork()
    if child == 0:
        grandchild = os.fork() if agrees() else -1
        if grandchild == 0:
            os._exit(0 if agrees() else 1)
        os._exit(0 if grandchild > 0 and succeeded(grandchild) else 1)
    assert succeeded(child)
    process = multiprocessing.get_context("fork").Process(target=lambda: os._exit(0 if agrees() else 1))
    process.start()
    process.join()
    assert process.exitcode == 0
    loader = DataLoader(Rows(agrees), num_workers=2, multiprocessing_context="fork")
    assert [int(item) for item in loader] == [1, 1, 1, 1]
    with ThreadPoolExecutor(1) as pool:  # a child of a process that computes
        busy = pool.submit(lambda: [agrees() for _ in range(8)])
        for _ in range(2):
            child = os.fork()
            if child == 0:
                os._exit(0 if agrees() else 1)
            assert succeeded(child)
        assert all(busy.result())
    assert agrees(), "the parent goes on as before"


def succeeded(child: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def loaded(library: KernelLibrary, layer: Layer, threads: int) -> FusedMoe:
    module = experts_of(4, 64, 96, 2, layer.form, kernel=library.kernel(SPEC.entry), threads=threads)
    for name, tensor in layer.stock.items():
        for expert in range(4):
            for part, values in canonical_parts(layer.form, name, tensor[expert]):
                module.load_expert(expert, part, values)
    return module


def run_alone(*words: str, threads: str = "2") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_children_of_a_process_that_used_kernels_compute_the_same(kernels: KernelLibrary) -> None:
    done = run_alone(__file__, str(kernels.path), kernels.digest, dict(kernels.entries)[SPEC.entry])
    assert done.returncode == 0, done.stderr[-4000:]


# In this process


@pytest.mark.parametrize("modules", [1, 8])
def test_eight_python_threads_compute_what_one_does(load: Load, modules: int) -> None:
    layers = [adapt(random_layer(64, 96, 4, 2, 9 + number, seed=number + 1), 5) for number in range(modules)]
    held = [load(adapted.layer, SPEC, threads=1 + number % 2) for number, adapted in enumerate(layers)]
    calls = [(held[number % modules], layers[number % modules]) for number in range(8)]
    expected = [run_adapted(module, adapted) for module, adapted in calls]

    def repeated(number: int) -> bool:
        module, adapted = calls[number]
        return all(same(run_adapted(module, adapted), expected[number]) for _ in range(10))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(repeated, range(8)))


IN_A_SUBINTERPRETER = """
import importlib.machinery, importlib.util, sys
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
LOAD = '''
import importlib.machinery, importlib.util
loader = importlib.machinery.ExtensionFileLoader("ktc_kernels", {path!r})
spec = importlib.util.spec_from_file_location("ktc_kernels", {path!r}, loader=loader)
loader.exec_module(importlib.util.module_from_spec(spec))
'''.format(path=sys.argv[1])
def refused():
    interpreter = interpreters.create()
    try:
        told = interpreters.run_string(interpreter, LOAD)  # 3.13 returns what was raised
        return str(getattr(told, "formatted", told))
    except Exception as error:
        return str(error)
    finally:
        interpreters.destroy(interpreter)
for _ in range(2):
    assert "interpreter" in refused() and "ImportError" in refused(), refused()
exec(LOAD)
assert "ImportError" in refused(), refused()
exec(LOAD)
"""


def test_a_subinterpreter_is_refused_by_name_and_the_main_one_goes_on(kernels: KernelLibrary) -> None:
    done = run_alone("-c", IN_A_SUBINTERPRETER, str(kernels.path))
    assert done.returncode == 0, done.stderr[-4000:]


if __name__ == "__main__":
    observations(KernelLibrary(Path(sys.argv[1]), sys.argv[2], ((SPEC.entry, sys.argv[3]),)))

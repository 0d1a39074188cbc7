"""What the layers of a process share: how many threads there are, what they do when idle, and the workspace."""

from __future__ import annotations

import os
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from kernel_layers import ISAS, Load, random_layer, run, spec_of

from ktc.foundation import host
from ktc.model.kernels import kernel_library
from ktc.model.kernels.kernel_library import KernelLibrary, permitted_threads

SPEC = spec_of(ISAS[0])


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def other_tasks() -> list[Path]:
    return [task for task in Path("/proc/self/task").iterdir() if int(task.name) != os.getpid()]


def sleeps(task: Path) -> bool:
    """Whether a thread comes to rest: asleep twice in a row within ten seconds."""
    last = ""
    for _ in range(1000):
        state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        if last == state == "S":
            return True
        last = state
        time.sleep(0.01)
    return False


def child_succeeds(child: int) -> bool:
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "usable_threads", lambda: 8)
    kernel_library._warn_of_fewer.cache_clear()


@pytest.mark.usefixtures("eight_cpus")
def test_processes_of_one_launch_share_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.warns(UserWarning, match=r"needs 6 .* may use 2, its share of 8 among 4 processes"):
        assert permitted_threads(6) == 2
    assert permitted_threads(2) == 2
    monkeypatch.setenv("KTC_STARTED_FOR", "out")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert permitted_threads(7) == 2, "the processes that `ktc train` starts share them without a warning"
    monkeypatch.delenv("KTC_STARTED_FOR")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100")
    with pytest.warns(UserWarning, match="may use 1"):
        assert permitted_threads(6) == 1


@pytest.mark.usefixtures("eight_cpus")
def test_a_warning_of_fewer_threads_comes_once(recwarn: pytest.WarningsRecorder) -> None:
    assert [permitted_threads(9) for _ in range(3)] == [8, 8, 8]
    assert len(recwarn) == 1


@pytest.mark.usefixtures("eight_cpus")
def test_engines_of_different_sizes_share_one_set_of_threads(load: Load) -> None:
    layer = random_layer(64, 96, 4, 2, 9)
    modules = [load(layer, SPEC, threads=threads) for threads in (1, 2, 3, 4)]
    child = os.fork()
    if child == 0:  # where no other test has started threads
        results = [run_forward(module, layer) for module in (*modules, *reversed(modules))]
        same = all(torch.equal(found, results[0]) for found in results)
        os._exit(0 if same and num_threads() == 4 else 1)
    assert child_succeeds(child)


def run_forward(module: torch.nn.Module, layer: object) -> torch.Tensor:
    return module(layer.x.bfloat16(), layer.index, layer.weights.float())  # type: ignore[attr-defined]


@pytest.mark.usefixtures("eight_cpus")
def test_idle_threads_sleep(load: Load) -> None:
    layer = random_layer(64, 96, 4, 2, 9)
    module = load(layer, SPEC, threads=4)
    child = os.fork()
    if child == 0:
        run_forward(module, layer)
        os._exit(0 if all(sleeps(task) for task in other_tasks()) else 1)
    assert child_succeeds(child)


def test_calls_of_a_process_take_turns_and_a_child_does_not_wait_for_its_parents(load: Load) -> None:
    layer = random_layer(64, 96, 4, 2, 9)
    module = load(layer, SPEC)
    expected = run_forward(module, layer)
    with ThreadPoolExecutor(1) as other:
        with kernel_library.KERNEL_LOCK:
            waiting = other.submit(run_forward, module, layer)
            child = os.fork()
            if child == 0:
                os._exit(0 if torch.equal(run_forward(module, layer), expected) else 1)
            assert child_succeeds(child)
            assert not waiting.done()
        assert torch.equal(waiting.result(), expected)


def test_threads_that_fail_to_start_do_not_spoil_the_others(kernels: KernelLibrary, load: Load) -> None:
    layer = random_layer(64, 96, 4, 2, 9)
    module = load(layer, SPEC, threads=2)
    expected = run(module, layer)
    before = num_threads()
    for absurd in (0, 4097, 100_000):
        with pytest.raises(ValueError, match=f"at least 1 and at most 4096, found {absurd}"):
            kernels.kernel(SPEC.entry).engine(absurd)
    assert num_threads() == before
    assert all(map(torch.equal, run(module, layer), expected))


def test_the_workspace_shrinks_when_calls_have_been_small_for_long(kernels: KernelLibrary, load: Load) -> None:
    module = load(random_layer(64, 96, 4, 2, 1), SPEC)
    engine, least = kernels.kernel(SPEC.entry).engine(1), 16 << 20

    def call(tokens: int) -> int:
        module(torch.zeros(tokens, 64).bfloat16(), torch.zeros(tokens, 2).long(), torch.zeros(tokens, 2))
        return engine.workspace_bytes

    large = call(20_000)
    assert large > least
    assert {call(1) for _ in range(255)} == {large}
    assert call(10_000) == large  # more than a quarter: the count begins again
    assert {call(1) for _ in range(200)} == {large}
    assert {call(50) for _ in range(55)} == {large}
    assert call(1) < least
    assert call(20_000) == large

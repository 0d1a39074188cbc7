"""How PyTorch's idle threads wait: the commands let them sleep, and a load tells where they spin beside a kernel's."""

from __future__ import annotations

import logging
import os

import pytest
import torch

from ktc.foundation import environment, host
from ktc.foundation.host import NumaNode
from ktc.model.kernels import openmp
from ktc.model.loading import load_as

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("name", "value"), [("GOMP_SPINCOUNT", "5"), ("OMP_WAIT_POLICY", "active")])
def test_idle_threads_sleep_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    environment.let_openmp_sleep()
    assert {each: os.environ[each] for each in VARIABLES if each in os.environ} == {name: value}
    monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_WAIT_POLICY", "")  # restored afterwards
    monkeypatch.delenv("OMP_WAIT_POLICY")
    environment.let_openmp_sleep()
    assert not environment.openmp_spins()


@pytest.mark.parametrize(
    ("name", "value", "spins"),
    [
        ("OMP_WAIT_POLICY", "", True), ("OMP_WAIT_POLICY", "PASSIVE", False), ("OMP_WAIT_POLICY", "active", True),
        ("GOMP_SPINCOUNT", "0", False), ("KMP_BLOCKTIME", "0", False), ("KMP_BLOCKTIME", "200", True),
    ],
)  # fmt: skip
def test_the_variables_say_whether_threads_spin(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, spins: bool
) -> None:
    monkeypatch.setenv(name, value)
    assert environment.openmp_spins() is spins


@pytest.mark.parametrize(
    ("threads", "of_torch", "nodes", "told"),
    [(2, 2, 1, False), (3, 2, 1, True), (2, 2, 2, True), (1, 2, 1, False), (2, 1, 1, False)],
)
def test_a_load_tells_once_of_threads_that_spin_beside_those_of_kernels(
    threads: int,
    of_torch: int,
    nodes: int,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: of_torch)
    monkeypatch.setattr(host, "numa_nodes", lambda: (NumaNode(0, tuple(range(8))),) * nodes)
    monkeypatch.setattr(openmp, "functions", lambda: (1, 1, 1, 1))
    load_as._warn_of_spinning.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            load_as._warn_of_spinning(threads)
    load_as._warn_of_spinning.cache_clear()
    assert ["L452" in each.message for each in caplog.records] == [True] * told

"""Batches that are fetched ahead: the same ones in the same order, and only where nothing can notice."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from stacked_training import StackingTrainer, assert_alike, trained
from torch import Tensor
from transformers import TrainerCallback

from ktc.training.trainers import fetch_ahead
from ktc.training.trainers.fetch_ahead import FetchAhead

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_ahead, "_DEVICES", {"cpu"})


def trainer_like(**changes: Any) -> Any:
    made = {
        "state": SimpleNamespace(global_step=1, max_steps=10),
        "args": SimpleNamespace(accelerator_config=SimpleNamespace(use_stateful_dataloader=False), device=CPU),
        "callback_handler": SimpleNamespace(callbacks=[TrainerCallback()]),
        "train_dataset": [1],
    }
    return SimpleNamespace(**{**made, **changes})


class Counted(Iterator[Any]):
    """Batches 0, 1, ..., with the number of those that were taken."""

    def __init__(self, end: int, at: Callable[[int], object] = lambda number: None) -> None:
        self.taken, self._end, self._at = 0, end, at

    def __next__(self) -> Tensor:
        if self.taken == self._end:
            raise StopIteration
        self._at(self.taken)
        self.taken += 1
        return torch.tensor(self.taken - 1)


def step(ahead: FetchAhead, source: Counted, count: int) -> list[int]:
    batches = ahead.iterator(source, count)
    return [int(batch) for _, batch in zip(range(count), batches, strict=False)]


def test_batches_come_in_their_order_and_once() -> None:
    ahead, source = FetchAhead(trainer_like()), Counted(8)
    assert step(ahead, source, 3) == [0, 1, 2]
    ahead.fetch(CPU)
    assert source.taken == 3, "the first step of an epoch shows how batches are made"
    assert step(ahead, source, 3) == [3, 4, 5]
    ahead.fetch(CPU)
    assert source.taken == 8, "the rest of the epoch"
    assert step(ahead, source, 1) == [6]
    assert step(ahead, source, 3) == [7]
    other = Counted(2)
    assert step(ahead, other, 2) == [0, 1]


def test_an_error_is_raised_where_its_batch_is_asked_for() -> None:
    def fails(number: int) -> None:
        if number == 5:
            raise ValueError("row 5")

    ahead, source = FetchAhead(trainer_like()), Counted(8, fails)
    step(ahead, source, 2)
    step(ahead, source, 2)
    ahead.fetch(CPU)
    batches = ahead.iterator(source, 2)
    assert int(next(batches)) == 4
    with pytest.raises(ValueError, match="row 5"):
        next(batches)


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), random.random, lambda: np.random.rand(1)])
def test_batches_that_draw_random_numbers_are_not_fetched_ahead(draw: Callable[[], object]) -> None:
    ahead, source = FetchAhead(trainer_like()), Counted(20, lambda number: draw())
    for taken in (2, 4, 6):
        step(ahead, source, 2)
        ahead.fetch(CPU)
        assert source.taken == taken


class Mine(TrainerCallback):
    """A callback of a user, which may change the data between two steps."""


@pytest.mark.parametrize(
    "changes",
    [
        {"state": SimpleNamespace(global_step=9, max_steps=10)},
        {"args": SimpleNamespace(accelerator_config=SimpleNamespace(use_stateful_dataloader=True), device=CPU)},
        {"args": SimpleNamespace(accelerator_config=SimpleNamespace(dispatch_batches=True), device=CPU)},
        {"callback_handler": SimpleNamespace(callbacks=[Mine()])},
        {"train_dataset": iter([1])},
    ],
)
def test_nothing_is_fetched_ahead_where_that_could_be_noticed(changes: dict[str, Any]) -> None:
    ahead, source = FetchAhead(trainer_like(**changes)), Counted(20)
    for taken in (2, 4, 6):
        step(ahead, source, 2)
        ahead.fetch(CPU)
        assert source.taken == taken


def test_a_run_trains_on_the_same_batches(
    package: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[int] = []
    fetch = fetch_ahead._Epoch.fetch

    def counted(self: Any, count: int) -> None:
        fetch(self, count)
        fetched.append(len(self._fetched))

    monkeypatch.setattr(fetch_ahead._Epoch, "fetch", counted)
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": 7}
    monkeypatch.setattr(fetch_ahead, "_KNOWN", {*fetch_ahead._KNOWN, "stacked_training"})
    ours = trained(package("qwen3_moe"), tmp_path, "on", trainer=StackingTrainer, **settings)
    assert fetched == [2, 2, 0, 2]  # four steps in an epoch; after the first, and not after the last of a run
    monkeypatch.setattr(fetch_ahead, "_DEVICES", set())
    theirs = trained(package("qwen3_moe"), tmp_path, "on", trainer=StackingTrainer, **settings)
    assert len(fetched) == 4
    assert_alike(ours, theirs, 1e-9)

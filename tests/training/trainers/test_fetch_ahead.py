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
from accelerate.data_loader import DataLoaderDispatcher
from stacked_training import StackingTrainer, assert_alike, trained
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import BatchEncoding, TrainerCallback

from ktc.training.trainers import fetch_ahead, phases, stacking
from ktc.training.trainers.embed_and_head import EmbedAndHead
from ktc.training.trainers.fetch_ahead import FetchAhead
from ktc.training.trainers.phases import PhaseClock

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


class Streamed(IterableDataset[int]):
    """Data with a length that one process may read for all."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[int]:
        return iter([1])


DISPATCHER = DataLoaderDispatcher.__new__(DataLoaderDispatcher)
CONFIG = SimpleNamespace(use_stateful_dataloader=False, dispatch_batches=None)


@pytest.mark.parametrize(
    "changes",
    [
        {"state": SimpleNamespace(global_step=9, max_steps=10)},
        {"args": SimpleNamespace(accelerator_config=SimpleNamespace(use_stateful_dataloader=True), device=CPU)},
        {"args": SimpleNamespace(accelerator_config=SimpleNamespace(dispatch_batches=True), device=CPU)},
        {"callback_handler": SimpleNamespace(callbacks=[Mine()])},
        {"train_dataset": iter([1])},
        {"train_dataset": Streamed(), "args": SimpleNamespace(accelerator_config=CONFIG, device=CPU, world_size=2)},
        {"callback_handler": SimpleNamespace(callbacks=[], train_dataloader=DISPATCHER)},
    ],
)
def test_nothing_is_fetched_ahead_where_that_could_be_noticed(changes: dict[str, Any]) -> None:
    ahead, source = FetchAhead(trainer_like(**changes)), Counted(20)
    for taken in (2, 4, 6):
        step(ahead, source, 2)
        ahead.fetch(CPU)
        assert source.taken == taken


def test_batches_of_one_process_are_fetched_ahead() -> None:
    ahead, source = FetchAhead(trainer_like(train_dataset=Streamed())), Counted(20)
    for taken in (2, 6, 8):
        step(ahead, source, 2)
        ahead.fetch(CPU)
        assert source.taken == taken


def test_tensors_are_found_in_every_mapping() -> None:
    epoch, rows = fetch_ahead._Epoch(iter([])), [torch.zeros(number) for number in range(4)]
    inner = BatchEncoding({"ids": rows[2], "rows": [rows[3]], "kind": "text"})
    epoch._fetched += BatchEncoding({"ids": rows[0]}), {"mask": rows[1], "inner": inner}
    assert [tensor.numel() for tensor in epoch.tensors()] == [0, 1, 2, 3]


def test_batches_are_fetched_before_a_step_waits_for_its_losses(
    package: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(name)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(FetchAhead, "fetch", noted("fetch", FetchAhead.fetch))
    monkeypatch.setattr(stacking, "sum_as_logged", noted("wait", stacking.sum_as_logged))
    backward = torch.autograd.backward
    monkeypatch.setattr(torch.autograd, "backward", noted("backward", backward))
    check = EmbedAndHead.check_unchanged
    monkeypatch.setattr(EmbedAndHead, "check_unchanged", noted("check", check))
    trained(package("qwen3_moe"), tmp_path, "on", gradient_accumulation_steps=2, max_steps=1)
    assert events[-4:] == ["backward", "fetch", "check", "wait"]


def test_fetching_ahead_counts_as_data(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(phases.time, "perf_counter", lambda: now)
    clock = PhaseClock()
    with clock.fetching():
        now = 1.0
    clock.begin()
    with clock.backward():
        now = 3.0
    with clock.fetching_ahead():
        now = 7.0
    now = 15.0
    step = clock.end()
    assert (step.seconds, step.phases["data"], step.phases["update"], step.phases["backward"]) == (15.0, 5.0, 8.0, 2.0)
    clock.begin()
    assert clock.end().phases["data"] == 0.0


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

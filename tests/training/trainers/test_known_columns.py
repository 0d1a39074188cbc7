"""Columns that were counted ahead are those that the device would be asked for, until a tensor changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ktc.training.trainers import joined_inputs, known_columns
from ktc.training.trainers.joined_inputs import joined, without_padding

MASKS = ([[1, 1, 1, 0], [1, 1, 0, 0]], [[1, 1, 1, 1]] * 2, [[1, 1, 0, 0]] * 2, [[0, 0, 0, 0]] * 2)


def batches() -> list[dict[str, Tensor]]:
    masks = [torch.tensor(mask) for mask in MASKS]
    return [{"input_ids": mask + 4, "attention_mask": mask, "labels": mask * 101 - 100} for mask in masks]


def cut(given: Any) -> list[Any]:
    inputs = without_padding(given)
    return [{name: value.tolist() for name, value in one.items()} for one in inputs]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The columns that a device was asked for."""
    monkeypatch.setattr(known_columns, "_DEVICES", {"cpu"})
    asked: list[int] = []
    stock = joined_inputs.last_named

    def named(mask: Tensor, labels: Tensor) -> Tensor:
        asked.append(mask.shape[1])
        return stock(mask, labels)

    monkeypatch.setattr(joined_inputs, "last_named", named)
    return asked


def test_counted_columns_are_those_of_the_device(reads: list[int]) -> None:
    plain, counted = batches(), batches()
    known_columns.count_columns([*counted, {"input_ids": torch.ones(2)}, "text"])
    assert cut(counted) == cut(plain)
    assert reads == [4] * 4, "of the plain ones"
    wholes = [known_columns.known_whole(one["attention_mask"]) for one in without_padding(counted)]
    assert wholes == [False, True, True, None]
    for given in (counted, plain):
        _, reason = joined([without_padding(given)], 64)
        assert reason == "rows have padding"


@pytest.mark.parametrize("name", ["attention_mask", "labels"])
def test_tensors_that_changed_are_counted_again(reads: list[int], name: str) -> None:
    counted = batches()
    known_columns.count_columns(counted)
    counted[2][name][0, 3] = 1
    assert len(cut(counted)[2]["input_ids"][0]) == 4
    assert len(reads) == 4
    mask = counted[0]["attention_mask"]
    known_columns.note_whole(mask, whole=True)
    assert known_columns.known_whole(mask)
    mask[0, 0] = 0
    assert known_columns.known_whole(mask) is None


def test_other_labels_are_counted_again(reads: list[int]) -> None:
    counted = batches()
    known_columns.count_columns(counted)
    counted[0]["labels"] = torch.ones_like(counted[0]["labels"])
    assert len(cut(counted)[0]["input_ids"][0]) == 4
    assert reads

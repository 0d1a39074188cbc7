"""Memory of calls of experts: a GPU uses it in place, or copies it, which the log says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ktc.model.experts.host import call_memory

GPUS = torch.device("cuda", 0), torch.device("cuda", 1)


def in_place(array: Any, device: torch.device) -> Tensor:
    """PyTorch takes an array of a GPU where that GPU pinned it."""
    return array.kept.view(-1).view(torch.uint8)


def copied(array: Any, device: torch.device) -> Tensor:
    """PyTorch takes an array of a GPU where another GPU pinned it."""
    return in_place(array, device).clone()


@pytest.fixture(autouse=True)
def _new_process() -> None:
    call_memory._tell_of_copies.cache_clear()


def test_copies_are_told_once_for_each_gpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch, "as_tensor", copied)
    for gpu in (*GPUS, *GPUS):
        assert call_memory.seen_by(torch.ones(2, 3), gpu) is None
    messages = [record.getMessage() for record in caplog.records]
    assert ["warning[L455]" in message for message in messages] == [True, True]
    assert all(f"`{gpu}`" in message for gpu, message in zip(GPUS, messages, strict=True))


def test_memory_that_is_used_in_place_is_not_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "as_tensor", in_place)
    memory = torch.ones(2, 3)
    seen = call_memory.seen_by(memory, GPUS[0])
    assert seen is not None and seen.data_ptr() == memory.data_ptr() and torch.equal(seen, memory)
    assert call_memory.seen_by(memory, torch.device("cpu")) is None
    assert not caplog.records

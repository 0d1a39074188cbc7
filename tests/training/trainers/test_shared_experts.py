"""Processes of a machine share what is sent to their GPUs; one process shares nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ktc.model.experts.backends.backend import Offload
from ktc.training.trainers import shared_experts


class Sent(nn.Module):
    """Routed experts that are sent to a GPU."""

    def __init__(self, *, resident: bool = False) -> None:
        super().__init__()
        self.offload: Any = Offload((torch.device("cuda:0"),), 1, resident=resident)
        self.weights = SimpleNamespace(packed=object())


@pytest.fixture(autouse=True)
def _sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_experts, "FusedMoe", Sent)


def test_one_process_shares_nothing() -> None:
    with shared_experts.shared_experts(nn.ModuleList([Sent()])) as sharing:
        assert sharing is None


def test_two_processes_share_the_layers_that_are_sent_in_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for name, value in (("distributed", True), ("by_nccl", True)):
        monkeypatch.setattr(shared_experts.gradients, name, lambda value=value: value)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    sent, stays = Sent(), Sent(resident=True)
    with shared_experts.shared_experts(nn.ModuleList([sent, stays])) as sharing:
        assert sharing is not None and sharing is sent.offload.sharing and stays.offload.sharing is None
        assert [sharing.share(5), sent.offload.takes(0)] == [range(2, 5), False]
        with shared_experts.in_step(sharing):
            assert sent.offload.takes(0), "calls of any size: the other process may have more tokens"
        assert not sharing.on
    assert sent.offload.sharing is None

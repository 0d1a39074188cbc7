"""The times of kinds of modules: each module's own, forward and backward, beside those inside it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from ktc.tools.bench.plans.kinds import KindClock
from ktc.training.trainers import part_clock


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(self.gate(x))


def test_experts_are_not_counted_in_the_block_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(part_clock.time, "perf_counter", lambda: next(seconds))
    block = Block()
    clock = KindClock({"mlp": [block], "experts": [block.experts], "attention": []})
    clock.attach()
    for _ in range(3):
        block(torch.ones(2, 3, requires_grad=True)).sum().backward()
        clock.end_round()
    clock.detach()
    # Forward and backward read the clock four times each: the block begins, the experts begin and end, the block ends.
    assert clock.medians == {"mlp": 4, "experts": 2, "attention": 0}
    block(torch.ones(2, 3, requires_grad=True)).sum().backward()
    assert next(seconds) == 24, "detached hooks do not read the clock"

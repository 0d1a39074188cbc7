"""Each side of a comparison has a model of its own, also where Python copies not all of its attributes."""

from __future__ import annotations

import threading

import torch
from torch import nn

from ktc.model.compare.copies import copied


def test_a_copy_has_its_own_weights_and_shares_what_python_does_not_copy() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    lock = threading.Lock()
    model[1].lock, model[1].seen = lock, [1]  # type: ignore[assignment]
    other = copied(model)
    assert other[1].lock is lock
    assert other[1].seen == [1]
    assert other[1].seen is not model[1].seen
    assert torch.equal(other[1].weight, model[1].weight)
    assert other[1].weight is not model[1].weight

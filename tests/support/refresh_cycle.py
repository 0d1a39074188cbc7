"""The circle of packed weights: restored, loaded again, processed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ktc.diagnostics import InputRefused
from ktc.model.experts.load_state import LoadState

NAME = "model.layers.3.mlp"


def assert_awaits(call: Callable[[], object], *said: str) -> None:
    with pytest.raises(InputRefused) as refused:
        call()
    (found,) = refused.value.diagnostics
    assert found.code == "L460"
    assert all(words in found.message for words in said), found.message


def assert_cycle(
    layer: Any, load: Callable[[], object], compute: Callable[[], Tensor], address: Callable[[], int]
) -> None:
    """A layer computes the same bits at the same address after a load of the same weights, and nothing before."""
    before, at = compute(), address()
    layer.process()
    assert torch.equal(compute(), before)
    layer.restore(NAME)
    assert_awaits(compute, NAME, "awaiting a load")
    assert_awaits(layer.process, NAME, "are missing")
    load()
    assert_awaits(compute, NAME, LoadState.PACKED_CANONICAL.value)
    layer.process()
    layer.process()
    assert torch.equal(compute(), before)
    assert address() == at

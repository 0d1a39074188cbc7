"""Calls of layers: models that are not a plain list of layers are refused, in words that name the cause."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ktc.diagnostics import InputRefused
from ktc.inference.prove.calls import LayerCall, record


class _Between(nn.Module):
    """A model that computes between its layers, or shares a dictionary among them."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor], shared: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self._between, self._shared = between, shared

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
        x = torch.ones(1, input_ids.shape[1], 4)
        for layer in self.layers:
            x = self._between(layer(x, cache={}) if self._shared else layer(x))
        return x


@pytest.mark.parametrize(("between", "shared"), [(lambda x: x * 2, False), (lambda x: x, True)])
def test_models_that_are_not_a_plain_list_of_layers_are_refused(
    between: Callable[[torch.Tensor], torch.Tensor], shared: bool
) -> None:
    model = _Between(between, shared)
    with pytest.raises(InputRefused) as refusal:
        record(model, list(model.layers), torch.zeros(1, 3, dtype=torch.int64))  # pyright: ignore[reportArgumentType]
    (found,) = refusal.value.diagnostics
    assert found.code == "N602"
    assert ("hand state to later layers in the argument `cache`" in found.message) == shared
    assert "`ktc eval`" in found.hint


class _Keeps(nn.Module):
    """A layer that fills a mapping which others read, as layers of gemma4 with shared keys and values do."""

    def forward(self, x: Tensor, states: UserDict[str, Tensor], keep: bool) -> Tensor:
        if keep:
            states["keys"] = x
        return x


def test_a_mapping_may_be_handed_on_and_not_be_filled() -> None:
    x, states = torch.ones(1, 3, 4), UserDict[str, Tensor]()
    LayerCall(None, (), {"states": states, "keep": False}, x.device).run(_Keeps(), x)
    with pytest.raises(InputRefused) as refusal:
        LayerCall(None, (), {"states": states, "keep": True}, x.device).run(_Keeps(), x)
    (found,) = refusal.value.diagnostics
    assert found.code == "N602"
    assert "in the argument `states`" in found.message

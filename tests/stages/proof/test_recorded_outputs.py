"""Outputs that hooks record are compared: a router that a rewrite no longer calls is noticed, and which option asks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families import config_of
from torch import nn
from transformers import PreTrainedModel

from ktc.model import twin
from ktc.stages.proof.whole import whole_difference

pytestmark = pytest.mark.usefixtures("one_thread")


class _Unrecorded(nn.Module):
    """A router under another class, which no recorder knows."""

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.held = [stock]

    def forward(self, hidden: torch.Tensor) -> Any:
        return type(self.held[0]).forward(self.held[0], hidden)


def difference(stock: PreTrainedModel, other: PreTrainedModel) -> str:
    def in_double() -> tuple[PreTrainedModel, PreTrainedModel]:
        return copy.deepcopy(stock).double(), copy.deepcopy(other).double()

    return whole_difference(stock, other, 7, in_double)[1]


def test_a_router_that_is_not_called_is_noticed_by_the_option_that_records_it() -> None:
    stock = twin.build(config_of("qwen3_moe", torch.float32, num_hidden_layers=1), 5)
    assert difference(stock, copy.deepcopy(stock)) == ""
    other = copy.deepcopy(stock)
    for layer in other.model.layers:
        layer.mlp.gate = _Unrecorded(layer.mlp.gate)
    told = difference(stock, other)
    assert told.endswith("its modules, or hooks on them, return what `output_router_logits` requests")
    assert stock.config.output_router_logits is False, "the config is as before"
    assert stock.config._attn_implementation == "sdpa"

"""Experts that a layer calls beside their router are one block, and rewritten if they are nothing but experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.gemma4 import modeling_gemma4

from ktc.model import twin
from ktc.model.graph import ops
from ktc.model.graph.typed import nodes_of
from ktc.stages.capture import CapturedModel, ModelSource, capture


def captured() -> CapturedModel:
    config = twin.shrink(twin.default_config("gemma4_text"))
    config.dtype = torch.float32
    return capture(ModelSource("gemma4_text", None, config, None))


class Doubled(modeling_gemma4.Gemma4TextExperts):
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden_states, top_k_index, top_k_weights) * 2


class Residual(modeling_gemma4.Gemma4TextExperts):
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return hidden_states + super().forward(hidden_states, top_k_index, top_k_weights)


class Flipped(modeling_gemma4.Gemma4TextExperts):
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden_states, top_k_index.flip(-1), top_k_weights)


def test_experts_beside_their_router_are_a_block_of_their_own() -> None:
    model = captured()
    (block,) = [block for block in model.blocks if block.class_name == "Gemma4TextExperts"]
    assert block.graph is not None
    assert [ops.operator(n) for n in nodes_of(block.graph) if n.op == "call_function"] == ["experts"]
    assert [site.fqn for site in model.sites_of(block.key)] == ["model.layers.0.experts", "model.layers.1.experts"]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (Doubled, "more than call its experts: `mul`"),
        pytest.param(Residual, "`add`", marks=pytest.mark.slow),
        (Flipped, "`flip`"),
    ],
)
def test_code_around_the_call_leaves_the_block_as_it_is(
    monkeypatch: pytest.MonkeyPatch, other: type, reason: str
) -> None:
    monkeypatch.setattr(modeling_gemma4, "Gemma4TextExperts", other)
    (block,) = [block for block in captured().blocks if block.class_name == other.__name__]
    assert block.graph is None
    assert reason in block.opaque

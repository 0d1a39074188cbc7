"""The model's code around its layers: what is the same for every micro-batch is done once per step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ktc.training.trainers.embed_and_head import EmbedAndHead
from ktc.training.trainers.layer_calls import ModelCall
from ktc.training.trainers.split_layer import CannotStack, SplitLayer


class Walked(nn.Linear):
    """Counts how often it is set to training or evaluation."""

    walks = 0

    def train(self, mode: bool = True) -> Walked:
        self.walks += 1
        return super().train(mode)


class Small(PreTrainedModel):
    """An embedding, layers and a head, whose input may be shifted."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.embedding, self.layers, self.head = nn.Embedding(8, 4), nn.ModuleList([Walked(4, 4)]), nn.Linear(4, 8)
        self.shift = 0.0

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.shift
        for layer in self.layers:
            x = layer(hidden_states=x)
        return self.head(x).sum()


@pytest.fixture
def model() -> Small:
    return Small()


def embed_and_head_of(model: Small) -> EmbedAndHead:
    trainer = SimpleNamespace(
        model=model, optimizer=None, accelerator=SimpleNamespace(unwrap_model=lambda model: model)
    )
    layers = [SplitLayer(layer, None, None) for layer in model.layers]
    return EmbedAndHead(trainer, model, layers, "not a causal model")


def ids(first: int) -> dict[str, Tensor]:
    return {"ids": torch.tensor([[first, 2, 3]])}


def one(model: nn.Module, inputs: dict[str, Tensor], num_items: Any) -> Tensor:
    model.train()
    loss = model(**inputs)
    loss.backward()
    return loss.detach()


def recorded(model: Small, inputs: dict[str, Tensor]) -> ModelCall:
    return ModelCall(model.embedding(inputs["ids"]).detach(), (torch.device("cpu"),), ())


def test_modules_are_set_to_training_once(model: Small) -> None:
    model.eval()
    before = model.layers[0].walks
    parts = embed_and_head_of(model)
    with parts.in_training():
        for first in (1, 4):
            final = torch.ones(1, 3, 4, requires_grad=True)
            assert float(parts.loss(one, ids(first), None, recorded(model, ids(first)), final)) == float(
                model.head(final).sum()
            )
            assert final.grad is not None
        assert model.layers[0].walks == before + 1
        assert model.training
        model.eval()
        assert not model.layers[0].training, "evaluation goes through all modules"
        model.train()
        assert model.layers[0].training, "and back"
    assert "train" not in vars(model)
    before = model.layers[0].walks
    with parts.in_training():
        assert model.layers[0].walks == before, "everything is still in training"
    model.layers[0].eval()
    with parts.in_training():
        assert model.layers[0].training


def test_a_micro_batch_that_changes_is_found_at_once_or_before_the_layers_backward(model: Small) -> None:
    final = torch.ones(1, 3, 4, requires_grad=True)
    calls = [recorded(model, ids(first)) for first in (1, 4)]
    model.shift = 0.5
    with pytest.raises(CannotStack, match="computed a second time"):
        embed_and_head_of(model).loss(one, ids(1), None, calls[0], final)
    assert final.grad is None, "no backward has begun"
    model.shift = 0.0
    parts = embed_and_head_of(model)
    parts.loss(one, ids(1), None, calls[0], final)
    parts.check_unchanged()
    model.shift = 0.5
    parts.loss(one, ids(4), None, calls[1], final)
    with pytest.raises(CannotStack, match="computed a second time"):
        parts.check_unchanged()
    with pytest.raises(CannotStack, match="computed a second time"):
        parts.loss(one, {"ids": torch.tensor([[1]])}, None, calls[1], final)

"""A model is shortened to its first layers, and what is left of it is a model."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ktc.model.loading.first_layers import keep_first_layers
from ktc.model.manifest.manifest import Rewrite

RECIPE = tuple(Rewrite(f"stack.layers.{layer}.mlp", "moe", None, "cpu", {}, "rule", "a.ktr:1:1") for layer in range(6))


class Stack(PreTrainedModel):
    _tied_weights_keys = {  # noqa: RUF012 - as models of transformers declare it
        r"layers\.1\.weight": r"layers\.0\.weight",
        r"layers\.(3|4)\.weight": r"layers\.2\.weight",
        r"layers\.5\.bias": r"layers\.0\.bias",
        r"head\.weight": r"layers\.0\.weight",
    }

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.head = nn.Linear(4, 4)
        self.post_init()


class Model(PreTrainedModel):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.stack = Stack(config)
        self.post_init()


def test_ties_of_removed_layers_go_and_the_others_stay() -> None:
    model = Model(PretrainedConfig(tie_word_embeddings=True))
    found = keep_first_layers(model, RECIPE, 0)
    assert (found.kept, found.all, len(found.recipe)) == (2, 6, 2)
    model.tie_weights()
    stack: Any = model.stack
    assert stack.head.weight is stack.layers[0].weight is stack.layers[1].weight
    assert set(Stack._tied_weights_keys) - set(stack._tied_weights_keys) == {
        r"layers\.(3|4)\.weight", r"layers\.5\.bias"
    }  # fmt: skip


def test_a_tie_that_matches_nothing_is_refused_as_by_stock() -> None:
    class Wrong(Stack):
        _tied_weights_keys = {r"layers\.9\.weight": r"layers\.0\.weight"}  # noqa: RUF012

    with pytest.raises(ValueError, match="tie_weights_keys"):
        Wrong(PretrainedConfig(tie_word_embeddings=True))

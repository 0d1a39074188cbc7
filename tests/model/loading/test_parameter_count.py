"""The number of parameters of a compiled model is that of the stock model, for every form of experts."""

from __future__ import annotations

import pytest
from torch import nn

from ktc.model.experts.module import FusedMoe
from ktc.model.loading.compiled_model import CompiledModel
from ktc.training.trainers import report

EXPERTS, HIDDEN, INNER = 3, 8, 4
LINEAR = 5 * 7


class Stock(nn.Module):
    """A linear layer, counted as transformers counts."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7, bias=False)
        self.experts = FusedMoe(EXPERTS, HIDDEN, INNER, 2, form)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        return sum(each.numel() for each in self.parameters() if each.requires_grad or not only_trainable)


class Compiled(CompiledModel, Stock):
    pass


@pytest.mark.parametrize(("form", "of_expert"), [
    ("silu", 3 * HIDDEN * INNER),
    ("silu biased transposed interleaved", 3 * HIDDEN * INNER + 2 * INNER + HIDDEN),
    ("relu2 ungated", 2 * HIDDEN * INNER),
    ("relu2 ungated biased", 2 * HIDDEN * INNER + INNER + HIDDEN),
])  # fmt: skip
def test_experts_count_with_their_matrices_and_biases(form: str, of_expert: int) -> None:
    model = Compiled(form)
    assert model.experts.num_parameters() == EXPERTS * of_expert
    assert model.num_parameters() == LINEAR + EXPERTS * of_expert
    assert model.num_parameters(only_trainable=True) == LINEAR
    assert report._parameters(model) == (LINEAR, LINEAR + EXPERTS * of_expert)

"""The number of parameters of a compiled model is that of the stock model, for every form of experts."""

from __future__ import annotations

import pytest
import torch
from kernel_layers import experts_of
from torch import nn

from ktc.model.experts.trained import frozen_weights
from ktc.model.experts.trained.weight_training import FROZEN, WeightTraining
from ktc.model.loading.compiled_model import CompiledModel
from ktc.training.trainers import report

EXPERTS, HIDDEN, INNER = 3, 8, 4
LINEAR = 5 * 7


class Stock(nn.Module):
    """A linear layer, counted as transformers counts."""

    def __init__(self, form: str, training: WeightTraining = FROZEN) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7, bias=False)
        self.experts = experts_of(EXPERTS, HIDDEN, INNER, 2, form, training=training)

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


def test_trained_experts_are_counted_once() -> None:
    model = Compiled("silu", WeightTraining(masters=torch.float32))
    of_experts = EXPERTS * 3 * HIDDEN * INNER
    assert model.num_parameters() == LINEAR + of_experts


@pytest.mark.parametrize("part", ["the model", "its experts"])
def test_packed_experts_stay_frozen_and_say_so(part: str, caplog: pytest.LogCaptureFixture) -> None:
    frozen_weights.forget_told()
    model = Compiled("silu")
    model.linear.requires_grad_(False)
    asked = model if part == "the model" else model.experts
    assert asked.requires_grad_(False) is asked and "L470" not in caplog.text
    assert asked.requires_grad_() is asked and asked.requires_grad_() is asked
    assert caplog.text.count("warning[L470]") == 1 and f"{EXPERTS * 3 * HIDDEN * INNER} packed weights" in caplog.text
    assert not any(weight.requires_grad for weight in model.experts.weights.stock.values())
    assert model.linear.weight.requires_grad is (part == "the model")


def test_a_second_model_of_the_same_size_says_so_too(caplog: pytest.LogCaptureFixture) -> None:
    frozen_weights.forget_told()
    first, second = Compiled("silu"), Compiled("silu")
    for model in (first, second, first):
        model.requires_grad_()
    assert caplog.text.count("warning[L470]") == 2


def test_experts_that_train_follow_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = Compiled("silu", WeightTraining(masters=torch.float32))
    model.requires_grad_(False)
    model.requires_grad_()
    assert all(parameter.requires_grad for parameter in model.experts.parameters()) and "L470" not in caplog.text

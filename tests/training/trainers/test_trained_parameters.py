"""What can have a gradient is known without a walk through the modules, also where it changes in a run."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from ktc.training.trainers.trained_parameters import TrainedParameters, cleared_by


def adapted() -> PeftModel:
    found = get_peft_model(nn.Sequential(nn.Linear(4, 4)), LoraConfig(r=2, target_modules=["0"]))
    assert isinstance(found, PeftModel)
    return found


def training(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def same(left: list[nn.Parameter], right: list[nn.Parameter]) -> bool:
    return [id(parameter) for parameter in left] == [id(parameter) for parameter in right]


def test_parameters_that_start_or_stop_training_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted()
    optimizer = torch.optim.SGD(training(model), lr=1.0)
    parameters, (first, second) = TrainedParameters(model), training(model)
    assert same(parameters.trained(optimizer), [first, second])
    with monkeypatch.context() as patched:
        patched.setattr(model, "parameters", lambda: pytest.fail("a walk through all modules"))
        first.requires_grad_(False)
        assert same(parameters.trained(optimizer), [second])
        first.grad = torch.ones_like(first)
        assert same(parameters.trained(optimizer), [first, second]), "a gradient of before is cleared too"
        parameters.clear(optimizer)
        assert first.grad is None
    model.add_adapter("other", LoraConfig(r=2, target_modules=["0"]))
    model.set_adapter("other")
    assert len(training(model)) == 2
    assert same(parameters.trained(optimizer), training(model))


def test_of_the_optimizers_parameters_only_those_of_the_model_are_its() -> None:
    model, outside = adapted(), nn.Parameter(torch.zeros(1))
    parameters, optimizer = TrainedParameters(model), torch.optim.SGD(training(model), lr=1.0)
    assert len(parameters.trained(None)) == 2
    late = nn.Parameter(torch.zeros(1))
    model.register_parameter("late", late)
    assert len(parameters.trained(optimizer)) == 2
    optimizer.add_param_group({"params": [late, outside]})
    assert same(parameters.trained(optimizer), training(model))
    outside.grad = torch.ones(1)
    parameters.clear(optimizer)
    assert outside.grad is not None


def test_copies_and_saved_models_have_the_stock_method() -> None:
    model, calls = nn.Linear(2, 2), list[int]()
    model.weight.grad = torch.ones(2, 2)
    saved = io.BytesIO()
    with cleared_by(model, lambda: not calls.append(1)):
        model.zero_grad()
        copied, shallow = copy.deepcopy(model), copy.copy(model)
        torch.save(model, saved)
        model.zero_grad(set_to_none=False)
    assert calls == [1]
    assert float(model.weight.grad.sum()) == 0
    saved.seek(0)
    kinds = [type(given) for given in (model, copied, shallow, torch.load(saved, weights_only=False))]
    assert kinds == [nn.Linear] * 4
    copied.zero_grad()
    assert copied.weight.grad is None


def test_the_stock_method_clears_where_the_parameters_are_not_known() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)
    with cleared_by(model, lambda: False), cleared_by(model, lambda: False):
        model.zero_grad()
    assert model.weight.grad is None
    assert type(model) is nn.Linear

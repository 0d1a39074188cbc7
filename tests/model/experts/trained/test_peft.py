"""Adapters on routed experts beside stock PEFT's, in whatever version of PEFT is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import ktc
from ktc.diagnostics import InputRefused
from ktc.foundation import versions

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SINCE_0_19 = versions.release(versions.installed("peft") or "0") >= (0, 19)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def models(compiled: Path, checkpoint: Path) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The stock model, and the compiled one in reference mode."""
    stock = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, experts_implementation="eager")
    return stock.eval(), ktc.load(compiled, reference=True)


def config(**settings: Any) -> LoraConfig:
    targets = {"target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS}
    return LoraConfig(**{"r": 3, "lora_alpha": 7, **targets, **settings})


def adapted(models: tuple[PreTrainedModel, ...], **settings: Any) -> tuple[PeftModel, ...]:
    return filled(tuple(get_peft_model(model, config(**settings)) for model in models))


def filled(models: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same numbers in the adapters of each: B is zeros at first."""
    for model in models:
        generator = torch.Generator().manual_seed(4)
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" in name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return models


def tokens(model: nn.Module) -> Tensor:
    return torch.randint(3, model.config.vocab_size, (2, 11), generator=torch.Generator().manual_seed(1))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens(model)).logits


def assert_close(stock: nn.Module, ours: nn.Module) -> Tensor:
    found, wanted = logits(ours), logits(stock)
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))
    return found


KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"use_rslora": True},
    {"target_parameters": EXPERTS[1:]},
    {"target_modules": [], "r": 5, "lora_alpha": 1},
)


@pytest.mark.parametrize("settings", KINDS, ids=lambda settings: "-".join(settings) or "plain")
def test_outputs_and_gradients_are_those_of_stock_peft(models: tuple[Any, ...], settings: dict[str, Any]) -> None:
    bare = logits(models[1])
    stock, ours = adapted(models, **settings)
    assert not torch.allclose(assert_close(stock, ours), bare, rtol=1e-3, atol=1e-3)
    for model in (stock, ours):
        model(input_ids=tokens(model), labels=tokens(model)).loss.backward()
    wanted = {name: p.grad for name, p in stock.named_parameters() if p.requires_grad}
    found = {name: p.grad for name, p in ours.named_parameters() if p.requires_grad}
    assert found.keys() == wanted.keys()
    assert any(".mlp.experts." in name for name in found)
    for name, gradient in found.items():
        assert torch.allclose(gradient, wanted[name], rtol=1e-3, atol=1e-5), name


def test_counts_are_those_of_stock_models(models: tuple[Any, ...]) -> None:
    stock, ours = adapted(models)
    assert ours.get_nb_trainable_parameters()[0] == stock.get_nb_trainable_parameters()[0]
    assert ours.get_base_model().num_parameters() == stock.get_base_model().num_parameters()
    if hasattr(stock.get_base_model(), "floating_point_ops"):  # gone from later releases of transformers
        inputs = {"input_ids": tokens(ours)}
        assert ours.get_base_model().floating_point_ops(inputs) == stock.get_base_model().floating_point_ops(inputs)
    names = {name for name in ours.state_dict() if ".mlp.experts." in name}
    assert names
    assert all("lora_" in name for name in names)  # nothing of the base


def test_an_adapter_goes_from_either_model_to_the_other(models: tuple[Any, ...], tmp_path: Path) -> None:
    stock, ours = adapted(models)
    states = [get_peft_model_state_dict(model) for model in (stock, ours)]
    assert {name: tuple(t.shape) for name, t in states[0].items()} == {n: tuple(t.shape) for n, t in states[1].items()}
    wanted = logits(ours)
    for name, model in (("stock", stock), ("ours", ours)):
        model.save_pretrained(str(tmp_path / name))
        model.unload()
    again = PeftModel.from_pretrained(models[1], str(tmp_path / "stock"))
    assert torch.allclose(logits(again), wanted, rtol=1e-4, atol=1e-5)
    there = PeftModel.from_pretrained(models[0], str(tmp_path / "ours"))
    assert torch.allclose(logits(there), wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


def test_several_adapters_and_one_of_them_active(models: tuple[Any, ...]) -> None:
    bare = logits(models[1])
    stock, ours = adapted(models)
    for model in (stock, ours):
        experts = EXPERTS if SINCE_0_19 else None  # before, PEFT itself allows one adapter with such targets
        model.add_adapter("second", config(r=2, use_rslora=True, target_modules=["o_proj"], target_parameters=experts))
    filled((stock, ours))
    first = assert_close(stock, ours)
    for model in (stock, ours):
        model.set_adapter("second")
    second = assert_close(stock, ours)
    assert not torch.allclose(first, second, rtol=1e-3, atol=1e-3)
    for model in (stock, ours):
        model.base_model.set_adapter(["default", "second"])
        model(input_ids=tokens(model), labels=tokens(model)).loss.backward()
    assert_close(stock, ours)
    wanted = {name: p.grad for name, p in stock.named_parameters() if p.grad is not None}
    found = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[name], wanted[name], rtol=1e-3, atol=1e-5) for name in found)
    with ours.disable_adapter():
        assert torch.equal(logits(ours), bare)
    for model in (stock, ours):
        model.set_adapter("default")
        model.delete_adapter("second")
    assert torch.equal(assert_close(stock, ours), first)


@pytest.mark.skipif(not SINCE_0_19, reason="before 0.19 PEFT takes such names for what they are")
@pytest.mark.parametrize(
    "targets", [["q_proj", "gate_proj", "up_proj", "down_proj"], r".*\.(q_proj|shared_experts\.(gate|up|down)_proj)"]
)
def test_names_that_peft_takes_for_routed_experts_are_refused(models: tuple[Any, ...], targets: Any) -> None:
    asked = LoraConfig(r=2, target_modules=targets)
    with pytest.raises(InputRefused, match=r"L434.*routed experts") as refused:
        get_peft_model(models[1], asked)
    assert "shared_experts.gate_proj.weight" in str(refused.value.diagnostics[0].hint)


def test_targets_that_are_named_after_the_config_was_made_count_as_well(models: tuple[Any, ...]) -> None:
    settings = LoraConfig(r=2, target_modules=["q_proj"])
    settings.target_parameters = EXPERTS
    trained = [name for name, p in get_peft_model(models[1], settings).named_parameters() if p.requires_grad]
    assert any(".mlp.experts." in name for name in trained)


@pytest.mark.skipif(not SINCE_0_19, reason="before 0.19 PEFT takes such names for what they are")
def test_modules_that_are_named_later_are_refused_with_what_peft_made_of_them(models: tuple[Any, ...]) -> None:
    settings = LoraConfig(r=2, target_modules=["q_proj"])
    settings.target_modules = {"q_proj", "down_proj"}
    with pytest.raises(InputRefused, match=r"L434.*made without `down_proj` in `target_parameters`"):
        get_peft_model(models[1], settings)


def test_shared_experts_are_adapted_by_their_weights(models: tuple[Any, ...]) -> None:
    names = [f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")]
    stock, ours = adapted(models, target_parameters=names)
    assert_close(stock, ours)
    trained = [name for name, p in ours.named_parameters() if p.requires_grad]
    assert any("shared_experts" in name for name in trained)
    assert not any(".mlp.experts." in name for name in trained)


def test_all_linear_layers_are_those_of_the_stock_model_without_the_experts(
    models: tuple[Any, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stock, ours = adapted(models, target_modules="all-linear", target_parameters=None)
    trained = [{name for name, p in model.named_parameters() if p.requires_grad} for model in (stock, ours)]
    assert trained[1] == {name for name in trained[0] if ".experts." not in name}
    assert any("q_proj" in name for name in trained[1])
    assert "L438" in caplog.text and 'target_parameters=["mlp.experts.gate_up_proj"' in caplog.text
    ours.save_pretrained(tmp_path)
    assert_close(PeftModel.from_pretrained(stock.unload(), tmp_path).eval(), ours)


def test_experts_beside_all_linear_layers_are_those_that_were_named(models: tuple[Any, ...]) -> None:
    stock, ours = adapted(models, target_modules="all-linear")
    trained = [{name for name, p in model.named_parameters() if p.requires_grad} for model in (stock, ours)]
    assert trained[0] == trained[1]

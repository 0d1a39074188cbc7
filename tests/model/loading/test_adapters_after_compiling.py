"""PEFT's operations on a compiled model's adapters: each gives what it gives on the stock model, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import ktc
from ktc.diagnostics import InputRefused
from ktc.model.loading.peft_glue import read_lora_config
from ktc.model.packed_store.placement import device_map

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(1))
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
Operation = Callable[[Any], Any]


def stock(folder: Path) -> PreTrainedModel:
    options = {"dtype": torch.float32, "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def fill(model: nn.Module, part: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if part in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3


class Adapted:
    """A base with the adapter `default`, and what an operation needs to make more of them."""

    def __init__(self, base: PreTrainedModel, out: Path, *, experts: bool) -> None:
        self._out, self._experts = out, experts
        torch.manual_seed(0)
        self.model: Any = get_peft_model(base, self.config())
        fill(self.model, "lora_B", 3)

    def config(self) -> LoraConfig:
        config = read_lora_config(self._out)
        return LoraConfig(
            r=config.r, lora_alpha=config.lora_alpha, target_modules=config.target_modules, task_type="CAUSAL_LM",
            target_parameters=EXPERTS if self._experts else None,
        )  # fmt: skip

    def with_second(self) -> Any:
        torch.manual_seed(1)
        self.model.add_adapter("second", self.config())
        fill(self.model, "lora_B.second", 9)
        return self.model


class Disabled(nn.Module):
    def __init__(self, model: PeftModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Any:
        with self.model.disable_adapter():
            return self.model(**inputs)


def active(made: Adapted, *names: str) -> Any:
    made.with_second().base_model.set_adapter(list(names))
    return made.model


def merged(made: Adapted) -> Any:
    made.model.merge_adapter()
    return made.model


def unmerged(made: Adapted) -> Any:
    merged(made).unmerge_adapter()
    return made.model


def one_merged(made: Adapted) -> Any:
    model = active(made, "second")
    model.merge_adapter(["second"])
    return model


def weighted(made: Adapted) -> Any:
    model = made.with_second()
    model.add_weighted_adapter(["default", "second"], [0.5, 0.7], "both", combination_type="linear")
    model.set_adapter("both")
    return model


def deleted(made: Adapted) -> Any:
    model = made.with_second()
    model.set_adapter("default")
    model.delete_adapter("second")
    return model


def refused_merge(made: Adapted) -> Any:
    """A merge that stops at the experts has merged layers before them, which count once all the same."""
    with pytest.raises(InputRefused, match="L433"):
        made.model.merge_adapter()
    return made.model


def double(made: Adapted) -> Any:
    return made.model.to(torch.float64)


ON_LAYERS: dict[str, Operation] = {
    "adapted": lambda made: made.model,
    "merged": merged,
    "unmerged": unmerged,
    "merged and unloaded": lambda made: made.model.merge_and_unload(),
    "unloaded": lambda made: made.model.unload(),
    "second": lambda made: active(made, "second"),
    "both at once": lambda made: active(made, "default", "second"),
    "one of two merged": one_merged,
    "weighted": weighted,
    "deleted": deleted,
    "disabled": lambda made: Disabled(made.model),
    "copied": lambda made: copy.deepcopy(made.model),
    "double": double,
}
SLOW = frozenset({"unloaded", "deleted", "copied", "weighted"})
ON_EXPERTS = ("adapted", "unloaded", "second", "both at once", "deleted", "disabled", "copied", "double")
REFUSED = ("merged", "merged and unloaded", "one of two merged")


def sample(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in names]


def assert_equal(operation: Operation, compiled: Path, checkpoint: Path, *, experts: bool) -> None:
    plain = stock(checkpoint)
    wanted = logits(operation(Adapted(plain, compiled, experts=experts)))
    found = logits(operation(Adapted(ktc.load(compiled, reference=True), compiled, experts=experts)))
    assert (found - wanted).norm() <= 5e-6 * wanted.norm()


@pytest.mark.parametrize("name", sample(ON_LAYERS))
def test_adapters_of_layers_are_those_of_the_stock_model(
    compiled: Path, checkpoint: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert_equal(ON_LAYERS[name], compiled, checkpoint, experts=False)
    assert "L428" not in caplog.text


@pytest.mark.parametrize("name", sample(ON_EXPERTS))
def test_adapters_of_experts_are_those_of_the_stock_model(
    compiled: Path, checkpoint: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert_equal(ON_LAYERS[name], compiled, checkpoint, experts=True)
    assert "L428" not in caplog.text


@pytest.mark.parametrize("name", REFUSED)
def test_packed_experts_refuse_a_merge(compiled: Path, name: str) -> None:
    with pytest.raises(InputRefused, match="L433"):
        ON_LAYERS[name](Adapted(ktc.load(compiled, reference=True), compiled, experts=True))


def test_adapters_of_too_large_a_rank_together_are_refused(compiled: Path) -> None:
    made = Adapted(ktc.load(compiled, reference=True), compiled, experts=True)
    config = made.config()
    config.r = 121
    made.model.add_adapter("second", config)
    made.model.base_model.set_adapter(["default", "second"])
    with pytest.raises(InputRefused, match="L432: the active adapters on routed experts have rank 129 together"):
        logits(made.model)


def test_a_refused_merge_changes_no_result(compiled: Path) -> None:
    wanted = logits(Adapted(ktc.load(compiled, reference=True), compiled, experts=True).model)
    found = logits(refused_merge(Adapted(ktc.load(compiled, reference=True), compiled, experts=True)))
    assert (found - wanted).norm() <= 5e-6 * wanted.norm()


def test_a_change_below_an_adapter_is_said(compiled: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Adapted(ktc.load(compiled, reference=True), compiled, experts=True).model
    logits(model)
    assert not caplog.records
    for layer in model.base_model.model.model.layers[1:]:
        layer.mlp.experts.get_base_layer().act_fn = nn.ReLU()
    logits(model)
    logits(model)
    assert [record.message.count("received `act_fn`") for record in caplog.records] == [1]


def test_an_adapter_is_loaded_without_placing_the_model_anew(
    compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT dispatches a model over the visible GPUs where its `hf_device_map` names the CPU: a resumed run moved."""
    Adapted(ktc.load(compiled, reference=True), compiled, experts=False).model.save_pretrained(tmp_path)
    monkeypatch.setattr("peft.peft_model.dispatch_model", lambda *args, **kwargs: pytest.fail("it was placed anew"))
    base = ktc.load(compiled, reference=True)
    base.hf_device_map = device_map({"": "cuda:1", "model.layers.1.mlp.experts": "cpu"})
    model = PeftModel.from_pretrained(base, tmp_path)
    model.load_adapter(tmp_path, "default", is_trainable=True)


def test_adapters_by_transformers_own_methods(compiled: Path, checkpoint: Path) -> None:
    found = list[Tensor]()
    for model in (stock(checkpoint), ktc.load(compiled, reference=True)):
        torch.manual_seed(0)
        model.add_adapter(read_lora_config(compiled), "one")
        fill(model, "lora_B", 3)
        found.append(logits(model))
        model.disable_adapters()
        found.append(logits(model))
        model.enable_adapters()
        model.add_adapter(read_lora_config(compiled), "two")
        model.set_adapter("two")
        fill(model, "lora_B.two", 5)
        found.append(logits(model))
    for wanted, ours in zip(found[:3], found[3:], strict=True):
        assert (ours - wanted).norm() <= 5e-6 * wanted.norm()
    assert (found[0] - found[1]).norm() > 0.05 * found[1].norm()

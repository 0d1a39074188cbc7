"""`output_router_logits`: the auxiliary loss of a compiled model, its gradients, and micro-batches that have one."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, TrainingArguments

import ktc
from ktc.diagnostics import InputRefused
from ktc.model import twin
from ktc.model.loading.peft_glue import read_lora_config
from ktc.stages.link import link
from ktc.training import KTrainer
from ktc.training.trainers.stacking import StackMode

pytestmark = pytest.mark.usefixtures("one_thread")
BATCH = torch.randint(3, 100, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return twin.write("qwen3_moe", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def out(source: Path, hand_made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return link(hand_made.package(source), tmp_path_factory.mktemp("build") / "qwen3_moe")


def adapted(base: Any, out: Path) -> Any:
    """A model with LoRA and trained routers."""
    torch.manual_seed(0)
    model = get_peft_model(base, read_lora_config(out))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
        elif name.endswith("mlp.gate.weight"):
            parameter.requires_grad_()
    model.config.router_aux_loss_coef = 0.5  # large enough to be seen
    return model.train()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_auxiliary_loss_and_its_gradients_are_those_of_stock(out: Path, source: Path, checkpointing: bool) -> None:
    options = {"dtype": torch.float32, "experts_implementation": "eager"}
    bases = AutoModelForCausalLM.from_pretrained(source, **options), ktc.load(out, reference=True)
    found = list[tuple[Any, dict[str, Tensor]]]()
    for base in bases:
        model = adapted(base, out)
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        result = model(input_ids=BATCH, labels=BATCH, output_router_logits=True)
        result.loss.backward()
        found.append((result, gradients(model)))
    (theirs, wanted), (ours, given) = found
    assert float(ours.aux_loss) == pytest.approx(float(theirs.aux_loss), rel=1e-6)
    assert float(ours.loss) == pytest.approx(float(theirs.loss), rel=1e-6)
    assert float(theirs.aux_loss) > 1
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours.router_logits, theirs.router_logits, strict=True))
    assert given.keys() == wanted.keys()
    assert sum("gate.weight" in name for name in given) == len(theirs.router_logits)
    for name, gradient in wanted.items():
        assert (given[name] - gradient).norm() <= 1e-5 * gradient.norm().clamp_min(1e-9), name


class Asking(KTrainer):
    """Asks for router logits from a step on: by the config, or in the inputs of the model."""

    def __init__(self, *args: Any, asks: str, from_step: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._asks, self._from = asks, from_step
        self.kept: list[dict[str, Tensor]] = []

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        if self.state.global_step >= self._from:
            if self._asks == "config":
                model.config.output_router_logits = True
            else:
                inputs = {**inputs, "output_router_logits": True}
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            self.kept.append(gradients(model))
        return loss


def trained(out: Path, folder: Path, mode: StackMode, asks: str, from_step: int) -> Asking:
    rows = [{"input_ids": row, "labels": row} for row in torch.cat([BATCH, BATCH.flip(1)] * 2)]
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=1, gradient_accumulation_steps=4, max_steps=2, optim="sgd",
        report_to=[], save_strategy="no", use_cpu=True, learning_rate=0.1, disable_tqdm=True, logging_steps=1, seed=3,
        max_grad_norm=0.0, remove_unused_columns=False,
    )  # fmt: skip
    model = adapted(ktc.load(out, reference=True), out)
    trainer = Asking(model, args, train_dataset=rows, stack_micro_batches=mode, asks=asks, from_step=from_step)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("asks", "from_step"),
    [
        pytest.param("config", 0, marks=pytest.mark.slow),
        ("config", 1),
        pytest.param("inputs", 1, marks=pytest.mark.slow),
    ],
)
def test_micro_batches_with_an_auxiliary_loss_are_computed_one_by_one(
    out: Path, tmp_path: Path, asks: str, from_step: int
) -> None:
    ours, theirs = (trained(out, tmp_path, mode, asks, from_step) for mode in ("auto", "off"))
    assert ours.stacker.decision is not None
    assert "auxiliary loss" in ours.stacker.decision.reason
    for found, wanted in zip(ours.kept, theirs.kept, strict=True):
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm().clamp_min(1e-9), name
    losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_stacking_that_was_requested_is_refused_when_the_loss_is_turned_on(out: Path, tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match=r"T540: .*auxiliary loss"):
        trained(out, tmp_path, "on", "config", 1)

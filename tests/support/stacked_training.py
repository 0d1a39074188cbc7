"""Small training runs whose micro-batches are stacked or not, with their first gradients and their logged losses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import ktc
from ktc.model.loading.peft_glue import read_lora_config
from ktc.training import KTrainer
from ktc.training.trainers.stacking import Stacker, StackMode

LENGTHS = (17, 9, 17, 23, 1, 17, 5, 12)
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


class StackingTrainer(KTrainer):
    """With small chunks, so that only some micro-batches share one, and with its first gradients kept."""

    def __init__(self, *args: Any, mode: StackMode, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stacker = Stacker(self, mode, chunk_tokens=40)
        self.gradients: dict[str, Tensor] = {}
        self.add_callback(KeepGradients(self))


class KeepGradients(TrainerCallback):
    def __init__(self, trainer: StackingTrainer) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        named = self._trainer.model.named_parameters()
        if not self._trainer.gradients:  # later ones follow weights that Adam has moved
            self._trainer.gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}


def rows(lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(5)
    made = [torch.randint(3, 128, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": ids, "labels": [-100] * (len(ids) // 3) + ids[len(ids) // 3 :]} for ids in made]


def padded(batch: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in batch)

    def filled(name: str, value: int) -> Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in batch])

    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in batch])
    return {"input_ids": filled("input_ids", 0), "labels": filled("labels", -100), "attention_mask": mask}


def peft_model(out: Path, *, dropout: float = 0.0, experts: bool = False) -> nn.Module:
    torch.manual_seed(0)
    rules = read_lora_config(out)
    config = LoraConfig(
        r=rules.r,
        lora_alpha=rules.lora_alpha,
        lora_dropout=dropout,
        target_modules=rules.target_modules,
        target_parameters=EXPERTS if experts else None,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(ktc.load(out, reference=True), config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at the start, which would leave A without a gradient
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
    return model


def trained(
    out: Path,
    folder: Path,
    mode: StackMode,
    *,
    batch: int = 1,
    collate: Callable[..., Any] = padded,
    dropout: float = 0.0,
    experts: bool = False,
    lengths: tuple[int, ...] = LENGTHS,
    trainer: type[StackingTrainer] = StackingTrainer,
    **settings: Any,
) -> StackingTrainer:
    defaults: dict[str, Any] = {"gradient_accumulation_steps": 8 // batch, "max_steps": 2, "optim": "sgd"}
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=batch, logging_steps=1, report_to=[], save_strategy="no",
        max_grad_norm=0.0, learning_rate=0.1, use_cpu=True, remove_unused_columns=False, disable_tqdm=True, seed=3,
        **{**defaults, **settings},
    )  # fmt: skip
    model = peft_model(out, dropout=dropout, experts=experts)
    made = trainer(model, args, mode=mode, train_dataset=rows(lengths), data_collator=collate)
    made.train()
    return made


def logged(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def assert_alike(ours: StackingTrainer, theirs: StackingTrainer, tolerance: float = 1e-6) -> None:
    assert ours.stacker.decision is not None
    assert ours.stacker.decision.on, ours.stacker.decision.reason
    assert ours.gradients.keys() == theirs.gradients.keys()
    for name, expected in theirs.gradients.items():
        error = float((ours.gradients[name] - expected).norm() / expected.norm().clamp_min(1e-12))
        assert error < tolerance, f"{name}: {error}"
    assert logged(ours) == pytest.approx(logged(theirs), rel=1e-6)

"""Short runs of the trainers on a small compiled model with an adapter, with their logged losses and trained values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import TrainingArguments

import ktc
from ktc.diagnostics import InputRefused
from ktc.model.loading.peft_glue import read_lora_config
from ktc.training import KTrainer


def adapted(out: Path, *, dropout: float = 0.0, seed: int = 0, reference: bool = True) -> PeftModel:
    """The compiled model, in fp32 or with its kernels, with the adapter of its rules."""
    config = read_lora_config(out)
    config.lora_dropout = dropout
    model = ktc.load(out, reference=reference)
    torch.manual_seed(seed)
    found = get_peft_model(model, config)
    assert isinstance(found, PeftModel)
    return found


def rows(vocab_size: int, count: int = 16, length: int = 12) -> list[dict[str, Tensor]]:
    ids = torch.randint(3, vocab_size, (count, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in ids]


def settings(folder: Path, **options: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(output_dir=str(folder), **{**defaults, **options})


def trainer(model: nn.Module, folder: Path, **options: Any) -> KTrainer:
    return KTrainer(model=model, args=settings(folder, **options), train_dataset=rows(model.config.vocab_size))


def losses(trained: KTrainer) -> list[float]:
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def code(error: pytest.ExceptionInfo[InputRefused]) -> str:
    return error.value.diagnostics[0].code


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def equal(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)

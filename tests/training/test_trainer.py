"""The trainers for compiled models: placement is theirs to keep, and a run that is resumed is the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import ktc
from ktc.diagnostics import InputRefused
from ktc.runtime.peft_glue import read_lora_config
from ktc.training import KTrainer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def out(compiled_twin: Callable[..., Path]) -> Path:
    return compiled_twin("tiny:qwen3_moe", "moe-lora")


def adapted(out: Path, *, dropout: float = 0.0, seed: int = 0) -> PeftModel:
    """The compiled model in fp32, with the adapter that its rules ask for."""
    config = read_lora_config(out)
    config.lora_dropout = dropout
    model = ktc.load(out, reference=True)
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


def test_it_trains_as_the_stock_trainer_does(out: Path, tmp_path: Path) -> None:
    model = adapted(out)
    stock = Trainer(model=model, args=settings(tmp_path), train_dataset=rows(model.config.vocab_size))
    stock.train()
    ours = trainer(adapted(out), tmp_path)
    ours.train()
    assert losses(ours) == losses(stock)
    assert losses(ours)[-1] < losses(ours)[0]


def test_nothing_moves_or_wraps_the_model(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = settings(tmp_path, max_steps=1)
    assert args.n_gpu <= 1
    monkeypatch.setattr(args, "_n_gpu", 2)  # as on a machine with two GPUs
    model = adapted(out)
    monkeypatch.setattr(model, "to", lambda *_, **__: pytest.fail("the model was moved"))
    ours = KTrainer(model=model, args=args, train_dataset=rows(model.config.vocab_size))
    ours.train()
    assert (args.n_gpu, ours._train_batch_size) == (1, 2)
    assert ours.model_wrapped is model


def test_a_model_that_is_not_compiled_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    with pytest.raises(InputRefused) as error:
        trainer(model, tmp_path)
    assert code(error) == "T530"


def test_training_without_an_adapter_is_refused(out: Path, tmp_path: Path) -> None:
    ours = trainer(ktc.load(out, reference=True), tmp_path)
    with pytest.raises(InputRefused) as error:
        ours.train()
    assert code(error) == "T531"


def test_sharding_is_refused(out: Path, tmp_path: Path) -> None:
    args = settings(tmp_path)
    args.deepspeed = "zero3.json"
    with pytest.raises(InputRefused) as error:
        KTrainer(model=adapted(out), args=args)
    assert code(error) == "T532"

"""A run that is resumed is the run, and checkpoints that do not fit it are refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file
from small_runs import adapted, code, equal, losses, rows, settings, trained, trainer
from transformers import EarlyStoppingCallback

import ktc
from ktc.diagnostics import InputRefused
from ktc.model.loading.peft_glue import read_lora_config
from ktc.training import KTrainer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def out(compiled_twin: Callable[..., Path]) -> Path:
    return compiled_twin("tiny:qwen3_moe", "moe-lora")


@pytest.mark.parametrize("experts", [False, True], ids=["attention", "experts"])
def test_a_resumed_run_is_the_uninterrupted_one(
    compiled_twin: Callable[..., Path], tmp_path: Path, experts: bool
) -> None:
    out = compiled_twin("tiny:qwen3_moe", "moe-experts-lora" if experts else "moe-lora")
    options: dict[str, Any] = {
        "max_steps": 6,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
    }
    dropout = 0.0 if experts else 0.3  # PEFT has no dropout on parameters
    whole = trainer(adapted(out, dropout=dropout), tmp_path / "whole", **options)
    whole.train()
    (tmp_path / "resumed").mkdir()
    shutil.copytree(tmp_path / "whole" / "checkpoint-3", tmp_path / "resumed" / "checkpoint-3")
    torch.manual_seed(99)
    resumed = trainer(adapted(out, dropout=dropout, seed=5), tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(whole)
    assert len(losses(whole)) == 6
    assert equal(trained(resumed.model), trained(whole.model))


def test_a_checkpoint_holds_the_adapter_and_not_the_base(out: Path, tmp_path: Path) -> None:
    ours = trainer(adapted(out), tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    ours.train()
    checkpoint = tmp_path / "checkpoint-1"
    assert not list(checkpoint.glob("model*"))
    saved = load_file(checkpoint / "adapter_model.safetensors")
    assert all("lora_" in name for name in saved)
    assert len(saved) == len(trained(ours.model))


def test_a_checkpoint_of_another_rank_is_refused_and_stays_whole(out: Path, tmp_path: Path) -> None:
    saved = trainer(adapted(out), tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    saved.train()
    checkpoint = tmp_path / "checkpoint-1"
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    lora = read_lora_config(out)
    lora.r *= 2
    ours = trainer(get_peft_model(ktc.load(out, reference=True), lora), tmp_path, max_steps=2)
    with pytest.raises(InputRefused) as error:
        ours.train(resume_from_checkpoint=True)
    (problem,) = error.value.diagnostics
    assert problem.code == "T524"
    assert f"checkpoint `{checkpoint}` does not fit this run" in problem.message
    assert "lora_A" in problem.message
    assert "has the shape" in problem.message
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before


def test_a_damaged_checkpoint_is_refused_before_the_trainer_reads_it(out: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer(adapted(out), tmp_path, **options).train()
    state = tmp_path / "checkpoint-1" / "trainer_state.json"
    whole = state.read_text()
    state.write_text(whole.replace('"global_step": 1', '"global_step": -1'))
    again = trainer(adapted(out), tmp_path, **options)
    with pytest.raises(InputRefused, match="`global_step`") as error:
        again.train(resume_from_checkpoint=True)
    assert code(error) == "T524"
    state.write_text(whole)
    torch.save({"state": {}, "param_groups": [{"params": [0]}]}, tmp_path / "checkpoint-1" / "optimizer.pt")
    with pytest.raises(InputRefused, match="other parameters"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_it_stops_early_and_goes_back_to_the_best(out: Path, tmp_path: Path) -> None:
    model = adapted(out)
    data = rows(model.config.vocab_size)
    options: dict[str, Any] = {
        "max_steps": 12,
        "learning_rate": 0.5,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # so that the best is not the last
        "report_to": ["tensorboard"],
    }
    ours = KTrainer(
        model=model,
        args=settings(tmp_path, **options),
        train_dataset=data,
        eval_dataset=data[:4],
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=1000)],
    )
    ours.train()
    assert ours.state.global_step == 3, "the first evaluation, and two that gain less than the threshold"
    best = Path(str(ours.state.best_model_checkpoint))
    assert best.name != "checkpoint-3", "going back must change something"
    saved = load_file(best / "adapter_model.safetensors")
    now = {name.replace(".default", ""): tensor for name, tensor in trained(ours.model).items()}
    assert equal(saved, now)
    assert list(tmp_path.rglob("events.out.tfevents.*")), "TensorBoard's log"

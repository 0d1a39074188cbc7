"""Adapters of routed experts are on the GPU of their experts while a trainer runs, and on the host before and after."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import TrainerCallback, TrainingArguments

import ktc
from ktc.model.experts.backends.backend import Offload
from ktc.model.experts.module import FusedMoe
from ktc.model.loading.peft_glue import read_lora_config
from ktc.training import KTrainer
from ktc.training.trainers.expert_adapters import Adapters, adapters_of, beside_experts

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def out(compiled_twin: Callable[..., Path]) -> Path:
    return compiled_twin("tiny:qwen3_moe", "moe-experts-lora")


def adapted(out: Path) -> PeftModel:
    torch.manual_seed(0)
    found = get_peft_model(ktc.load(out), read_lora_config(out))
    assert isinstance(found, PeftModel)
    return found


def factors(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if ".experts." in name and "lora_" in name}


def test_experts_of_the_cpu_have_nothing_to_move(out: Path) -> None:
    model = adapted(out)
    before = factors(model)
    assert before
    with beside_experts(model, SimpleNamespace(optimizer=None)) as where:
        assert where == ""
        assert all(one is other for one, other in zip(factors(model).values(), before.values(), strict=True))


def test_they_move_where_they_take_half_of_what_is_free_at_most() -> None:
    weights = (nn.Parameter(torch.zeros(64, 4)), nn.Parameter(torch.zeros(4, 64)))
    nbytes = 4 * 2 * 64 * 4 * 4
    device = torch.device("cuda:0")
    assert Adapters(device, weights, 2 * nbytes).nbytes == nbytes
    assert Adapters(device, weights, 2 * nbytes).fits
    assert not Adapters(device, weights, 2 * nbytes - 1).fits
    assert "on cuda:0" in Adapters(device, weights, 2 * nbytes).told(moved=True)
    assert "in host memory" in Adapters(device, weights, nbytes).told(moved=False)
    weights[0].requires_grad_(False)
    assert Adapters(device, weights, 0).nbytes == nbytes // 2 + nbytes // 8


class Where(TrainerCallback):
    """The devices of factors and of their optimizer's state, after each step."""

    def __init__(self) -> None:
        self.devices: list[set[str]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        optimizer = given["optimizer"]
        trained = factors(given["model"]).values()
        of_state = (
            value.device.type for weight in trained for name, value in optimizer.state[weight].items() if name != "step"
        )
        self.devices.append({*(weight.device.type for weight in trained), *of_state})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_they_train_there_and_losses_are_the_cpus(out: Path, tmp_path: Path) -> None:
    def losses(offload: Offload | None) -> tuple[list[float], set[str]]:
        model, where = adapted(out), Where()
        for module in model.modules():
            if isinstance(module, FusedMoe):
                module.offload = offload
        ids = torch.randint(3, model.config.vocab_size, (16, 12), generator=torch.Generator().manual_seed(1))
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, gradient_accumulation_steps=2, logging_steps=1, report_to=[],
            save_strategy="no", use_cpu=True, disable_tqdm=True, learning_rate=5e-3,
        )  # fmt: skip
        trainer = KTrainer(
            model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids],
            callbacks=[where],
        )  # fmt: skip
        trainer.train()
        assert {weight.device.type for weight in factors(model).values()} == {"cpu"}
        assert where.devices[1:] == where.devices[:-1]
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], where.devices[0]

    on_cpu, there = losses(None)
    assert there == {"cpu"}
    on_gpu, there = losses(Offload((torch.device("cuda:0"),), min_tokens=1))
    assert there == {"cuda"}
    assert on_gpu == pytest.approx(on_cpu, rel=5e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("fits", [True, False], ids=["on the GPU", "in host memory"])
def test_beside_a_gpu_a_resumed_run_is_the_uninterrupted_one(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    monkeypatch.setattr(Adapters, "fits", fits)

    def run(folder: Path, seed: int, resume: bool | None = None) -> tuple[KTrainer, dict[str, torch.Tensor]]:
        model = adapted(out)
        with torch.no_grad():
            for factor in factors(model).values():
                factor += 1e-3 * seed  # which the checkpoint's replace
        for module in model.modules():
            if isinstance(module, FusedMoe):
                module.offload = Offload((torch.device("cuda:0"),), min_tokens=1)
        ids = torch.randint(3, model.config.vocab_size, (16, 12), generator=torch.Generator().manual_seed(1))
        arguments = TrainingArguments(
            output_dir=str(folder), max_steps=4, gradient_accumulation_steps=2, logging_steps=1, report_to=[],
            save_strategy="steps", save_steps=2, use_cpu=True, disable_tqdm=True, learning_rate=5e-3,
        )  # fmt: skip
        rows: Any = [{"input_ids": row, "labels": row} for row in ids]
        trainer = KTrainer(model=model, args=arguments, train_dataset=rows)
        trainer.train(resume_from_checkpoint=resume)
        assert ("on cuda:0" in trainer.expert_adapters) is fits
        return trainer, {name: factor.detach().clone() for name, factor in factors(model).items()}

    whole, wanted = run(tmp_path / "whole", 0)
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    resumed, found = run(tmp_path / "resumed", 1, resume=True)
    assert [entry.get("loss") for entry in resumed.state.log_history] == [
        entry.get("loss") for entry in whole.state.log_history
    ]
    assert all(torch.equal(found[name], factor) for name, factor in wanted.items())


def test_frozen_factors_are_left_out(out: Path) -> None:
    model = adapted(out).requires_grad_(False)
    for module in model.modules():
        if isinstance(module, FusedMoe):
            module.offload = Offload((torch.device("meta"),), min_tokens=1)
    assert list(adapters_of(model)) == []

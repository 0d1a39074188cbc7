"""Tampered run folders: each is refused with its file and field before the Trainer reads anything of it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict  # pyright: ignore[reportUnknownVariableType]
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerState

from ktc.training.trainers import checkpoint_state
from ktc.training.tune.run_folder import checkpoint_faults

STATE, CONFIG, RANDOM = "trainer_state.json", "adapter_config.json", "rng_state.pth"


class Code:
    """What a hostile pickle does when it is loaded."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, ("ran",)


def make_checkpoint(folder: Path) -> tuple[Any, torch.optim.Optimizer]:
    """Write a checkpoint as the Trainer does after two steps. Return the model under its adapter, and the optimizer."""
    import random

    import numpy as np

    base = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8))
    base.config = {}  # pyright: ignore[reportArgumentType]  # which PEFT looks at
    model: Any = get_peft_model(base, LoraConfig(r=2, lora_alpha=4, target_modules=["0", "1"]))  # pyright: ignore[reportArgumentType]
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW([{"params": trained}, {"params": []}], lr=0.01)
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    for _ in range(2):
        model(torch.ones(1, 8)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    model.save_pretrained(str(folder))
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(scheduler.state_dict(), folder / "scheduler.pt")
    generators = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    torch.save(generators, folder / RANDOM)
    TrainerState(global_step=2, max_steps=4, log_history=[{"loss": 1.0, "step": 1}]).save_to_json(str(folder / STATE))
    return model, optimizer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "checkpoint-2"
    make_checkpoint(folder)
    return folder


def edited(file: str, **values: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**content, **values}))

    return edit


def written(file: str, content: bytes) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / file).write_bytes(content)

    return edit


def saved(file: str, value: object) -> Callable[[Path], None]:
    return lambda folder: torch.save(value, folder / file)


def changed(file: str, change: Callable[[Any], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = torch.load(folder / file, weights_only=False)
        change(content)
        torch.save(content, folder / file)

    return edit


def piped(file: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / file).unlink()
        os.mkfifo(folder / file)

    return edit


def linked_to_itself(file: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / file).unlink()
        (folder / file).symlink_to(folder / file)

    return edit


def compressed(folder: Path) -> None:
    with zipfile.ZipFile(folder / "optimizer.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 20))


TAMPERED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a list for the state": (written(STATE, b"[]"), "not a JSON object"),
    "no JSON": (written(STATE, b"{"), STATE),
    "JSON nested deeply": (written(STATE, b"[" * 100_000), "nested too deeply"),
    "not UTF-8": (written(STATE, b'{"\xff": 1}'), STATE),
    "a text for a step": (edited(STATE, global_step="2"), "`global_step`"),
    "a negative step": (edited(STATE, global_step=-1_000_000_000), "`global_step`"),
    "a huge step": (edited(STATE, global_step=10**30), "`global_step`"),
    "a step beyond the last": (edited(STATE, max_steps=1), "beyond `max_steps`"),
    "another step than the folder's": (edited(STATE, global_step=1), "`checkpoint-2`"),
    "a truth value for a step": (edited(STATE, global_step=True), "`global_step`"),
    "an epoch that is no number": (edited(STATE, epoch=float("nan")), "`epoch`"),
    "an object for the history": (edited(STATE, log_history={}), "`log_history`"),
    "a history of numbers": (edited(STATE, log_history=[1]), "`log_history`"),
    "a negative batch": (edited(STATE, train_batch_size=-1), "`train_batch_size`"),
    "an unknown field": (edited(STATE, surprise=1), "`surprise`"),
    "the best checkpoint elsewhere": (edited(STATE, best_model_checkpoint="/etc"), "`best_model_checkpoint`"),
    "callbacks as a list": (edited(STATE, stateful_callbacks=[1]), "`stateful_callbacks`"),
    "a pipe for the state": (piped(STATE), "a pipe"),
    "a pipe for the adapter": (piped("adapter_model.safetensors"), "a pipe"),
    "a pipe for the config": (piped(CONFIG), "a pipe"),
    "a pipe for the optimizer": (piped("optimizer.pt"), "a pipe"),
    "a pipe for random states": (piped(RANDOM), "a pipe"),
    "a loop of links": (linked_to_itself(STATE), "it lacks `trainer_state.json`"),
    "an empty optimizer": (written("optimizer.pt", b""), "optimizer.pt"),
    "an optimizer of code": (saved("optimizer.pt", Code()), "optimizer.pt"),
    "a plain pickle of code": (written("optimizer.pt", pickle.dumps(Code())), "optimizer.pt"),
    "a compressed optimizer": (compressed, "compressed"),
    "a list for the optimizer": (saved("optimizer.pt", [1]), "not the state of an optimizer"),
    "groups that are none": (saved("optimizer.pt", {"state": {}, "param_groups": 3}), "`param_groups`"),
    "a parameter that is none": (changed("optimizer.pt", lambda s: s["state"].update({99: {}})), "`99`"),
    "a sparse moment": (
        changed("optimizer.pt", lambda s: s["state"][0].update(exp_avg=torch.eye(2).to_sparse())),
        "`exp_avg` of parameter 0",
    ),
    "a moment larger than its file": (
        changed("optimizer.pt", lambda s: s["state"][0].update(exp_avg=torch.zeros(1).expand(1 << 40))),
        "`exp_avg` of parameter 0",
    ),
    "a scheduler of code": (saved("scheduler.pt", Code()), "scheduler.pt"),
    "a number for the scheduler": (saved("scheduler.pt", 3), "scheduler.pt"),
    "a scheduler's negative epoch": (changed("scheduler.pt", lambda s: s.update(last_epoch=-5)), "`last_epoch`"),
    "a scheduler's own attribute": (changed("scheduler.pt", lambda s: s.update(step=None)), "`step`"),
    "a rate that is no number": (changed("scheduler.pt", lambda s: s.update(base_lrs=[float("nan")])), "`base_lrs`"),
    "random states of code": (saved(RANDOM, Code()), RANDOM),
    "random states of a list": (saved(RANDOM, [1]), RANDOM),
    "no random states": (saved(RANDOM, {}), "`python`"),
    "another version of random states": (changed(RANDOM, lambda s: s.update(python=(9, (1,), None))), "`python`"),
    "numpy's state too short": (changed(RANDOM, lambda s: s.update(numpy=("MT19937", [1], 0, 0, 0.0))), "`numpy`"),
    "torch's state too short": (changed(RANDOM, lambda s: s.update(cpu=s["cpu"][:10])), "`cpu`"),
    "a rank of a billion": (edited(CONFIG, r=1_000_000_000), "`r`"),
    "a rank that no tensor has": (edited(CONFIG, r=5), "no rank"),
    "code in the config": (edited(CONFIG, megatron_config={"a": 1}), "`megatron_config`"),
    "another model in the checkpoint": (written("config.json", b"{"), "`config.json`"),
    "a pickled adapter": (written("adapter_model.bin", b"x"), "`adapter_model.bin`"),
    "a folder in the checkpoint": (lambda folder: (folder / "other").mkdir(), "`other`"),
}  # fmt: skip


MISFITS: tuple[tuple[Callable[[Any], object], str], ...] = (
    (lambda s: s["state"][1].update(exp_avg_sq=torch.zeros(3)), "`exp_avg_sq` of parameter 1"),
    (lambda s: s["state"][1].update(step=torch.tensor(-1.0)), "`step` of parameter 1"),
    (lambda s: s["state"][1].pop("step"), "parameter 1"),
    (lambda s: s["param_groups"][0].update(capturable=True), "`capturable`"),
    (lambda s: s["param_groups"][0].update(lr="0.1"), "`lr`"),
    (lambda s: s["param_groups"][0].update(surprise=1), "`surprise`"),
)


@pytest.mark.parametrize("name", TAMPERED)
def test_a_tampered_checkpoint_is_refused_with_the_file_and_the_field(name: str, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(whole, folder)
    tamper, wanted = TAMPERED[name]
    tamper(folder)
    faults = checkpoint_faults(folder)
    assert faults
    assert wanted in faults[0]
    assert not (tmp_path / "ran").exists()
    assert not Path("ran").exists()


def test_a_whole_checkpoint_has_no_faults(whole: Path) -> None:
    assert checkpoint_faults(whole) == ()


def test_a_state_of_another_optimizer_or_adapter_is_refused(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(whole, folder)
    model, optimizer = make_checkpoint(tmp_path / "other")
    shapes = {name: tuple(tensor.shape) for name, tensor in get_peft_model_state_dict(model).items()}
    assert checkpoint_state.adapter_fault(folder, shapes) == ""
    assert checkpoint_state.optimizer_fault(folder, optimizer) == ""
    first = next(iter(shapes))
    assert "has the shape" in checkpoint_state.adapter_fault(folder, {**shapes, first: (1, 1)})
    assert "lacks `more`" in checkpoint_state.adapter_fault(folder, {**shapes, "more": (1,)})
    fewer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    assert "other parameters" in checkpoint_state.optimizer_fault(folder, fewer)
    for change, wanted in MISFITS:
        shutil.copyfile(whole / "optimizer.pt", folder / "optimizer.pt")
        changed("optimizer.pt", change)(folder)
        assert wanted in checkpoint_state.optimizer_fault(folder, optimizer)

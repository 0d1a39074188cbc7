"""The trainers for compiled models: they train as stock does, and placement is theirs to keep."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from small_runs import adapted, code, losses, rows, settings, trainer
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

import ktc
from ktc.diagnostics import InputRefused
from ktc.training import KTrainer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def out(compiled_twin: Callable[..., Path]) -> Path:
    return compiled_twin("tiny:qwen3_moe", "moe-lora")


def test_it_trains_as_the_stock_trainer_does(out: Path, tmp_path: Path) -> None:
    model = adapted(out)
    stock = Trainer(model=model, args=settings(tmp_path), train_dataset=rows(model.config.vocab_size))
    stock.train()
    ours = trainer(adapted(out), tmp_path)
    ours.train()
    assert losses(ours) == losses(stock)
    assert losses(ours)[-1] < losses(ours)[0]


class Copies(TrainerCallback):
    """Copies and pickles the model after a step."""

    def __init__(self, kinds: Sequence[Callable[[Any], Any]]) -> None:
        self.kinds, self.copies = kinds, list[Any]()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.copies = [kind(given["model"]) for kind in self.kinds]


@pytest.mark.parametrize("reference", [True, False])
def test_a_callback_may_copy_and_pickle_the_model(out: Path, tmp_path: Path, reference: bool) -> None:
    def pickled(model: nn.Module) -> Any:
        file = io.BytesIO()
        torch.save(model, file)
        return torch.load(io.BytesIO(file.getvalue()), weights_only=False)

    model = adapted(out, reference=reference)
    copies = Copies([copy.deepcopy, pickled] if reference else [copy.deepcopy])  # packed weights have no pickle (L435)
    run = KTrainer(
        model=model, args=settings(tmp_path, max_steps=1), train_dataset=rows(model.config.vocab_size),
        callbacks=[copies],
    )  # fmt: skip
    run.train()
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        for copied in copies.copies:
            assert torch.equal(copied.eval()(ids).logits, model.eval()(ids).logits)
    assert len(copies.copies) == 1 + reference
    assert not any(copied is model for copied in copies.copies)


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


@pytest.mark.parametrize("options", [{"gradient_checkpointing": True}, {"bf16": True}], ids=["checkpointing", "bf16"])
def test_options_of_the_trainer_give_its_losses(out: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    plain, other = trainer(adapted(out), tmp_path), trainer(adapted(out), tmp_path, **options)
    plain.train()
    other.train()
    assert losses(other) == pytest.approx(losses(plain), abs=0.05 if "bf16" in options else 1e-6)


def test_the_generated_kernels_train_as_the_reference_does(out: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 4, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}

    def of(model: PeftModel) -> list[float]:
        same = rows(model.config.vocab_size, count=2) * 4  # in every step, so that the loss falls
        ours = KTrainer(model=model, args=settings(tmp_path, **options), train_dataset=same)
        ours.train()
        return losses(ours)

    found = of(adapted(out, reference=False))
    assert found == pytest.approx(of(adapted(out)), abs=0.05), "bf16 against fp32"
    assert found[0] - found[-1] > 0.25, "a tolerance must be smaller than what is learned"

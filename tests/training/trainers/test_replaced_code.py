"""Code that is set on a trainer or its model in the middle of a run has the losses of separate micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stacked_training import StackingTrainer, logged, trained
from torch import Tensor
from torch.nn import functional
from transformers.trainer_pt_utils import LabelSmoother

from ktc.diagnostics import InputRefused

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def package(package: Callable[[str], Path]) -> Path:
    return package("qwen3_moe")


def read_logits(trainer: Any) -> None:
    stock = trainer.compute_loss

    def compute_loss(model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        loss, out = stock(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        loss = loss + 0.1 * out["logits"].float().logsumexp(-1).square().mean()
        return (loss, out) if return_outputs else loss

    trainer.compute_loss = compute_loss


def give_function(trainer: Any) -> None:
    def compute_loss_func(out: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits = out["logits"][:, :-1].float().flatten(0, 1)
        return functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch

    trainer.compute_loss_func = compute_loss_func


def smooth_labels(trainer: Any) -> None:
    trainer.label_smoother = LabelSmoother(0.3)


def change_model(trainer: Any) -> None:
    model = trainer.model.get_base_model()
    stock = model.loss_function
    model.loss_function = lambda *args, **kwargs: 3 * stock(*args, **kwargs)


def call_twice(trainer: Any) -> None:
    stock = trainer.compute_loss
    trainer.compute_loss = lambda model, inputs, **kwargs: stock(model, inputs, **kwargs) + model(**inputs).loss


def restore(trainer: Any) -> None:
    vars(trainer).pop("compute_loss")


def changed(*changes: Callable[[Any], None]) -> type[StackingTrainer]:
    """Return a trainer that is changed after its first step, and again after each one that follows."""

    class Changed(StackingTrainer):
        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            if 0 < self.state.global_step <= len(changes):
                changes[self.state.global_step - 1](self)
            return super().get_batch_samples(*args, **kwargs)

    return Changed


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (read_logits, "computes the loss itself"),
        (give_function, "the loss is not the model's own"),
        (smooth_labels, "the loss is not the model's own"),
        (change_model, "is not that of a causal language model"),
    ],
)
def test_a_loss_that_is_set_after_a_step_gets_whole_logits(
    package: Path, tmp_path: Path, change: Callable[[Any], None], told: str
) -> None:
    ours, theirs = (trained(package, tmp_path, mode, trainer=changed(change)) for mode in ("on", "off"))
    assert ours.stacker.decision is not None
    assert told in ours.stacker.decision.whole_loss
    assert told in ours.stacker.decision.one_by_one
    assert logged(ours) == pytest.approx(logged(theirs), rel=1e-5)


def test_a_loss_that_is_put_back_is_computed_in_chunks_again(package: Path, tmp_path: Path) -> None:
    kind = changed(read_logits, restore)
    ours, theirs = (trained(package, tmp_path, mode, trainer=kind, max_steps=3) for mode in ("on", "off"))
    assert ours.stacker.decision is not None
    assert ours.stacker.decision.whole_loss == ours.stacker.decision.one_by_one == ""
    assert logged(ours) == pytest.approx(logged(theirs), rel=1e-5)


def test_a_loss_that_calls_the_model_twice_ends_stacking_after_a_step(package: Path, tmp_path: Path) -> None:
    kind = changed(call_twice)
    ours, theirs = (trained(package, tmp_path, mode, trainer=kind) for mode in ("auto", "off"))
    assert ours.stacker.decision is not None
    assert not ours.stacker.decision.on
    assert "more than once" in ours.stacker.decision.reason
    assert logged(ours) == pytest.approx(logged(theirs), rel=1e-5)
    with pytest.raises(InputRefused) as refused:
        trained(package, tmp_path, "on", trainer=kind)
    assert refused.value.diagnostics[0].code == "T540"


def test_the_sizes_of_a_step_are_decided_anew_for_another_loss(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wholes: list[bool] = []

    def counted(*_: Any, whole: bool) -> int:
        wholes.append(whole)
        return 0

    monkeypatch.setattr("ktc.training.trainers.stacking.loss_bytes", counted)
    trained(package, tmp_path, "on", lengths=(17,) * 8, trainer=changed(read_logits), max_steps=3)
    assert wholes == [False, True]

"""Log-probabilities on the path of a trainer: one step of `KTrainer`, before its update.

In: a model with an adapter, sequences, and the settings of `ktc train` that decide how it computes. Out: `Scores` of
every sequence, and how the micro-batches were computed. Each sequence is a micro-batch, and all are one step, so they
are stacked where `ktc train` would stack them. Modules are in training mode with autograd on, and under autocast of
bf16 where `ktc train` has it. Dropout is off, since it draws other numbers than any other path. The learning rate is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PrinterCallback, TrainingArguments

from ktc.foundation.files import temporary_folder
from ktc.inference.consistency.scores import Scores, joined, score
from ktc.model.compare.shown import Shown, arguments
from ktc.training import KTrainer
from ktc.training.trainers.stacking import StackMode


@dataclass(frozen=True, slots=True)
class Trained:
    """The scores (N, T - 1) of sequences (N, T), and how their micro-batches were computed, in words."""

    scores: Scores
    stacked: bool
    stacking: str


def uses_autocast(dtype: torch.dtype, precision: str) -> bool:
    """Return whether `ktc train` with this `precision` runs a model of `dtype` under autocast of bf16."""
    return precision == "bf16" and dtype == torch.bfloat16


def trainer_scores(
    model: PeftModel, rows: Tensor, *, autocast: bool, stack: StackMode = "auto",
    shown: Shown | None = None, called: Callable[[], None] = lambda: None,
) -> Trained:  # fmt: skip
    """Return the scores of `rows` (N, T) int64 on the trainer's path. The adapter's values stay as they are.

    Each row begins with the question `shown`, if one is given. `called` runs with each micro-batch.

    Raises:
        InputRefused: as `KTrainer` does, T540 where `stack` is `on` and micro-batches cannot be stacked.
    """
    on_gpu = any(parameter.is_cuda for parameter in model.parameters())
    with temporary_folder("consistency") as folder, _without_dropout(model):
        settings = TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=1,
            gradient_accumulation_steps=len(rows),
            max_steps=1,
            learning_rate=0.0,
            weight_decay=0.0,
            bf16=autocast,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not on_gpu,
            dataloader_pin_memory=on_gpu,
            remove_unused_columns=False,
        )
        trainer = _Recording(
            model=model, args=settings, train_dataset=cast("Any", _Rows(rows)), stack_micro_batches=stack,
            data_collator=cast("Any", _Collator(rows, shown)),
        )  # fmt: skip
        trainer.called = called
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    decision = trainer.stacker.decision
    assert decision is not None, "a step decides it"
    how = f"micro-batches {'stacked' if decision.on else 'one by one'}: {decision.reason}"
    return Trained(joined([trainer.scores[number] for number in range(len(rows))]), decision.on, how)


class _Rows(torch.utils.data.Dataset[int]):
    """The numbers of sequences."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> int:
        return number


class _Collator:
    """Micro-batches of one sequence, with its number. Pixels are as the processor makes them, as in `ktc train`."""

    def __init__(self, rows: Tensor, shown: Shown | None) -> None:
        self._rows, self._shown, self.with_images = rows, shown, shown is not None

    def __call__(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        (number,) = numbers
        return {**arguments(self._rows[number][None], self._shown), "number": torch.tensor(number)}


class _Recording(KTrainer):
    """A trainer of the stock loss that keeps the log-probabilities of each sequence."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scores: dict[int, Scores] = {}
        self.called: Callable[[], None] = lambda: None

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Return the mean negative log-probability of the next tokens."""
        number, ids = int(inputs.pop("number")), inputs["input_ids"]
        logits: Tensor = model(**inputs, use_cache=False).logits[:, :-1]
        self.scores[number] = score(logits, ids[:, 1:])
        self.called()
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten().to(logits.device))


@contextmanager
def _without_dropout(model: nn.Module) -> Generator[None]:
    probabilities = [(module, module.p) for module in model.modules() if isinstance(module, nn.Dropout)]
    try:
        for module, _ in probabilities:
            module.p = 0.0
        yield
    finally:
        for module, p in probabilities:
            module.p = p

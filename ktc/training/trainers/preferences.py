"""TRL's trainers of preferences for rows that are tokens already, and the same for a compiled model.

In: rows of `prompt_ids` with `chosen_ids` and `rejected_ids` (DPO), or with `completion_ids` and `label` (KTO). TRL has
no public way to leave its own preparation of texts out; `tests/training/tune/test_preferences.py` compares both.
"""

from __future__ import annotations

from typing import Any

from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_config import KTOConfig
from trl.trainer.kto_trainer import KTOTrainer

from ktc.training.trainers.trainer import KTrainerMixin


class TokenisedDPOTrainer(DPOTrainer):
    """`trl.DPOTrainer` for rows of tokens."""

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return dataset


class TokenisedKTOTrainer(KTOTrainer):
    """`trl.KTOTrainer` for rows of tokens."""

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: KTOConfig, dataset_name: str) -> Any:
        return dataset.map(with_kl_completions, batched=True, batch_size=args.per_device_train_batch_size)


class KTDPOTrainer(KTrainerMixin, TokenisedDPOTrainer):
    """`trl.DPOTrainer` for a compiled model and rows of tokens."""


class KTKTOTrainer(KTrainerMixin, TokenisedKTOTrainer):
    """`trl.KTOTrainer` for a compiled model and rows of tokens."""


def with_kl_completions(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the answers of a batch moved on by one row: KTO estimates its KL term from prompts with other answers."""
    answers = batch["completion_ids"]
    return {"KL_completion_ids": [answers[-1], *answers[:-1]]}

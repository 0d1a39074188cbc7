"""TRL's trainers of preferences for rows that are tokens already, and the same for a compiled model.

In: rows of `prompt_ids` with `chosen_ids` and `rejected_ids` (DPO), or with `completion_ids` and `label` (KTO). TRL's
own preparation of texts is left out for them; other rows take it.
"""

from __future__ import annotations

from typing import Any

from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

from ktc.training.trainers.trainer import KTrainerMixin


class TokenisedDPOTrainer(DPOTrainer):
    """`trl.DPOTrainer` that takes rows of tokens."""

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return dataset if _is_tokenised(dataset) else super()._prepare_dataset(dataset, *args, **kwargs)


class TokenisedKTOTrainer(KTOTrainer):
    """`trl.KTOTrainer` that takes rows of tokens."""

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_tokenised(dataset):
            return super()._prepare_dataset(dataset, *args, **kwargs)
        if not self.calculate_KL:
            return dataset
        size = self.args.per_device_train_batch_size
        return dataset.map(with_kl_completions, batched=True, batch_size=size)


class KTDPOTrainer(KTrainerMixin, TokenisedDPOTrainer):
    """`trl.DPOTrainer` for a compiled model."""


class KTKTOTrainer(KTrainerMixin, TokenisedKTOTrainer):
    """`trl.KTOTrainer` for a compiled model."""


def with_kl_completions(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the answers of a batch moved on by one row: KTO estimates its KL term from prompts with other answers."""
    answers = batch["completion_ids"]
    return {"KL_completion_ids": [answers[-1], *answers[:-1]]}


def _is_tokenised(dataset: Any) -> bool:
    return "prompt_ids" in (dataset.column_names or ())

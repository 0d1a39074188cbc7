"""TRL's supervised fine-tuning for a compiled model. Only this module imports TRL."""

from __future__ import annotations

from trl.trainer.sft_trainer import SFTTrainer

from ktc.training.trainers.trainer import KTrainerMixin


class KTSFTTrainer(KTrainerMixin, SFTTrainer):
    """`trl.SFTTrainer` for a compiled model."""

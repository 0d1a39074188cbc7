"""TRL's supervised fine-tuning for a compiled model. TRL is asked for only here."""

from __future__ import annotations

from trl.trainer.sft_trainer import SFTTrainer

from ktc.training.trainer import KTrainerMixin


class KTSFTTrainer(KTrainerMixin, SFTTrainer):
    """`trl.SFTTrainer` for a compiled model."""

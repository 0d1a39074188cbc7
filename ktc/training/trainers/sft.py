"""TRL's supervised fine-tuning for a compiled model. Only this module imports TRL."""

from __future__ import annotations

from trl.trainer.sft_trainer import SFTTrainer

from ktc.training.trainers.trainer import KTrainerMixin


class KTSFTTrainer(KTrainerMixin, SFTTrainer):
    """`trl.SFTTrainer` for a compiled model."""

    @property
    def has_loss_in_tiles(self) -> bool:
        """Whether the loss has some logits at a time (`ktc/model/hf/logit_tiles.py`), and never those of all tokens."""
        return not self.compute_loss_func and not self.args.label_smoothing_factor

"""Training a compiled model with the HF Trainer and TRL's trainers, whose placement the compiler decides.

Public: `KTrainer`, `KTSFTTrainer`, and `KTrainerMixin` for any other trainer. Each name is imported at its first use,
so that only users of `KTSFTTrainer` need TRL.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ktc.training.trainers.sft import KTSFTTrainer
    from ktc.training.trainers.trainer import KTrainer, KTrainerMixin

_HOME = {
    "KTSFTTrainer": "ktc.training.trainers.sft",
    "KTrainer": "ktc.training.trainers.trainer",
    "KTrainerMixin": "ktc.training.trainers.trainer",
}
__all__ = ["KTSFTTrainer", "KTrainer", "KTrainerMixin"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module `ktc.training` has no attribute `{name}`")
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value

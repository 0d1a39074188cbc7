"""The methods of a run: which of TRL's trainers learns, for the compiled model and for a stock one.

In: the method's name. Out: its trainers, its class of arguments and their values beyond those that all methods have.
"""

from __future__ import annotations

from typing import Any

from trl.trainer.dpo_config import DPOConfig
from trl.trainer.kto_config import KTOConfig
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from ktc.training import KTSFTTrainer
from ktc.training.trainers.preferences import KTDPOTrainer, KTKTOTrainer, TokenisedDPOTrainer, TokenisedKTOTrainer
from ktc.training.tune.settings import Method, TrainSettings

Arguments = SFTConfig | DPOConfig | KTOConfig


def compiled_trainer(method: Method) -> Any:
    """Return the class that trains a compiled model."""
    return {"sft": KTSFTTrainer, "dpo": KTDPOTrainer, "kto": KTKTOTrainer}[method]


def stock_trainer(method: Method) -> Any:
    """Return the class that trains a stock model on the same rows."""
    return {"sft": SFTTrainer, "dpo": TokenisedDPOTrainer, "kto": TokenisedKTOTrainer}[method]


def arguments_class(method: Method) -> type[Arguments]:
    """Return the class of the trainer's arguments."""
    classes: dict[Method, type[Arguments]] = {"sft": SFTConfig, "dpo": DPOConfig, "kto": KTOConfig}
    return classes[method]


def arguments_of_method(settings: TrainSettings) -> dict[str, Any]:
    """Return the arguments that only the trainer of this method has."""
    if settings.method == "sft":
        return {"packing": settings.packing, "eval_packing": False}
    # TRL trains preferences without dropout, also LoRA's, unless the user sets one.
    beta = {} if settings.beta is None else {"beta": settings.beta}
    return {"disable_dropout": settings.dropout is None, **beta}

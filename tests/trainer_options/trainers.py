"""The five trainers: stock, and as ktc's for a compiled model, with their rows and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset
from stacked_training import padded
from transformers import Trainer, TrainingArguments
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    SFTConfig,
    SFTTrainer,
)

from ktc.training import KTrainer, KTrainerMixin, KTSFTTrainer
from trainer_options import of_trl
from trainer_options.of_transformers import OPTIONS, PACKAGES
from trainer_options.option import Options

_ANSWERS = ("Paris.", "it is Tokyo", "eight legs", "a bird has two", "six", "the sea", "no", "the dog does not care")
_COMMON = {
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
}
_PLAIN: Mapping[str, Any] = {"bf16": False, "gradient_checkpointing": False}  # unlike TRL's defaults


class KTDPOTrainer(KTrainerMixin, DPOTrainer):
    """`trl.DPOTrainer` for a compiled model."""


class KTKTOTrainer(KTrainerMixin, KTOTrainer):
    """`trl.KTOTrainer` for a compiled model."""


class KTGRPOTrainer(KTrainerMixin, GRPOTrainer):
    """`trl.GRPOTrainer` for a compiled model."""


def _tokens() -> list[dict[str, list[int]]]:
    made = [torch.randint(3, 100, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(4, 12)]
    return [{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in made]


def _question(number: int) -> str:
    return "Question: how many" + " legs" * (number % 3)


def _completions() -> Dataset:
    rows = [{"prompt": _question(n), "completion": f" Answer: {answer}"} for n, answer in enumerate(_ANSWERS)]
    return Dataset.from_list(rows)


def _conversations() -> Dataset:
    said = [(_question(n), answer) for n, answer in enumerate(_ANSWERS)]
    asked = [({"role": "user", "content": q}, {"role": "assistant", "content": a}) for q, a in said]
    return Dataset.from_list([{"messages": [*turn, *turn]} for turn in asked])


def _preferences() -> Dataset:
    pairs = zip(_ANSWERS, reversed(_ANSWERS), strict=True)
    return Dataset.from_list(
        [{"prompt": _question(n), "chosen": f" {a}", "rejected": f" {b}"} for n, (a, b) in enumerate(pairs)]
    )


def _judged() -> Dataset:
    answers = enumerate(_ANSWERS)
    return Dataset.from_list([{"prompt": _question(n), "completion": f" {a}", "label": n % 3 > 0} for n, a in answers])


def _prompts() -> Dataset:
    return Dataset.from_list([{"prompt": _question(n) + f" {answer}"} for n, answer in enumerate(_ANSWERS)])


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return a number for each completion that differs between most of them."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


@dataclass(frozen=True, slots=True)
class Kind:
    """A trainer. `options` classify the fields of `arguments`; `compiled` are the classes for a compiled model."""

    stock: type[Trainer]
    compiled: tuple[type[Trainer], ...]
    arguments: type[TrainingArguments]
    options: Options
    rows: Mapping[str, Callable[[], Any]]
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    given: Mapping[str, Any] = field(default_factory=dict[str, Any])
    has_tokenizer: bool = True

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The settings of the runs, beside which an option is tried."""
        return {**_COMMON, **self.settings}


KINDS: Mapping[str, Kind] = {
    "trainer": Kind(
        Trainer, (KTrainer, Trainer), TrainingArguments, {**OPTIONS, **PACKAGES}, {"": _tokens},
        given={"data_collator": padded}, has_tokenizer=False,
    ),
    "sft": Kind(
        SFTTrainer, (KTSFTTrainer,), SFTConfig, {**OPTIONS, **of_trl.SFT},
        {"": _completions, "conversations": _conversations}, _PLAIN,
    ),
    "dpo": Kind(DPOTrainer, (KTDPOTrainer,), DPOConfig, {**OPTIONS, **of_trl.DPO}, {"": _preferences}, _PLAIN),
    "kto": Kind(KTOTrainer, (KTKTOTrainer,), KTOConfig, {**OPTIONS, **of_trl.KTO}, {"": _judged}, _PLAIN),
    "grpo": Kind(
        GRPOTrainer, (KTGRPOTrainer,), GRPOConfig, {**OPTIONS, **of_trl.GRPO}, {"": _prompts},
        {**_PLAIN, "num_generations": 2, "max_completion_length": 4}, {"reward_funcs": reward},
    ),
}  # fmt: skip

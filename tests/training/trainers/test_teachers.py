"""A second model in a trainer's loss has its own masks, also where the trained one's layers are not run again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from stacked_training import KeepGradients, StackingTrainer, assert_alike, logged, peft_model, trained
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config
from trl import DPOConfig, DPOTrainer

from ktc.training.trainers.stacking import StackMode
from ktc.training.trainers.trainer import KTrainerMixin

pytestmark = pytest.mark.usefixtures("one_thread")


def dense(scale: float) -> Any:
    """Return a model whose answers depend much on which tokens it sees."""
    torch.manual_seed(3)
    sizes: dict[str, int] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
    heads: dict[str, int] = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes, **heads)).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(scale)
    return model


class Distilled(StackingTrainer):
    teacher: Any = None
    first = True

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        given = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
        with torch.no_grad():
            known = self.teacher(**given).logits if self.first else None
        answers = model(**inputs).logits
        with torch.no_grad():
            wanted = self.teacher(**given).logits if known is None else known
        return functional.kl_div(answers.log_softmax(-1), wanted.softmax(-1), reduction="batchmean")


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_a_teacher_sees_what_it_does_alone(
    package: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, first: bool
) -> None:
    monkeypatch.setattr(Distilled, "teacher", dense(8))
    monkeypatch.setattr(Distilled, "first", first)
    runs = [trained(package("qwen3_moe"), tmp_path, mode, trainer=Distilled, max_steps=1) for mode in ("on", "off")]
    assert_alike(*runs)


class Preferred(KTrainerMixin, DPOTrainer):
    gradients: dict[str, Tensor]


def test_a_reference_of_preferences_sees_what_it_does_alone(package: Callable[[str], Path], tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(128)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w1", eos_token="w2")
    generator = torch.Generator().manual_seed(0)

    def text(count: int) -> str:
        return "".join(f"w{token} " for token in torch.randint(3, 128, (count,), generator=generator).tolist())

    data = Dataset.from_list([{"prompt": text(5), "chosen": text(6), "rejected": text(7)} for _ in range(4)])

    def run(mode: StackMode) -> Preferred:
        args = DPOConfig(
            str(tmp_path / mode), per_device_train_batch_size=1, gradient_accumulation_steps=4, logging_steps=1,
            report_to=[], save_strategy="no", max_steps=1, use_cpu=True, bf16=False, disable_tqdm=True, seed=3,
            gradient_checkpointing=False, max_grad_norm=0.0, optim="sgd", router_aux_loss_coef=0.0,
        )  # fmt: skip
        model, reference = peft_model(package("qwen3_moe")), dense(8)
        made = Preferred(
            model, ref_model=reference, args=args, train_dataset=data, processing_class=tokenizer,
            stack_micro_batches=mode,
        )  # fmt: skip
        made.gradients = {}
        made.add_callback(KeepGradients(made))
        made.train()
        return made

    ours, theirs = run("on"), run("off")
    assert_alike(ours, theirs, 1e-5)
    for name in ("rewards/chosen", "rewards/rejected"):
        assert ours.state.log_history[0][name] == pytest.approx(theirs.state.log_history[0][name], rel=1e-5)
    assert logged(ours)

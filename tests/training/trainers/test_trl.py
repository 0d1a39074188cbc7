"""The trainers of TRL on a compiled model."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import adapted, code, equal, losses, settings, trained
from transformers import AutoTokenizer, Trainer, TrainingArguments

from ktc.diagnostics import InputRefused
from ktc.training import KTrainer, KTrainerMixin, KTSFTTrainer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def out(compiled_twin: Callable[..., Path]) -> Path:
    return compiled_twin("tiny:qwen3_moe", "moe-lora")


def with_trl(
    base: str, out: Path, folder: Path, data: list[dict[str, Any]], made: type[Trainer] | None = None, **options: Any
) -> KTrainer:
    """Two steps of a trainer of TRL behind the mixin, or of the one that is given."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    stock = getattr(trl, f"{base}Trainer")
    made = made or (KTSFTTrainer if base == "SFT" else type(f"KT{base}Trainer", (KTrainerMixin, stock), {}))
    funcs = {name: options.pop(name) for name in ("reward_funcs",) if name in options}
    args = getattr(trl, f"{base}Config")(**{**vars_of(settings(folder, max_steps=2)), **options})
    ours = made(
        model=adapted(out),
        args=args,
        train_dataset=Dataset.from_list(data),
        processing_class=AutoTokenizer.from_pretrained(out),
        **funcs,
    )
    ours.train()
    assert all(math.isfinite(loss) for loss in losses(ours))
    return ours


def vars_of(args: TrainingArguments) -> dict[str, Any]:
    names = (
        "output_dir",
        "max_steps",
        "per_device_train_batch_size",
        "learning_rate",
        "logging_steps",
        "save_strategy",
    )
    return {name: getattr(args, name) for name in names} | {
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "bf16": False,
    }


def test_sft_trains(out: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    data = [{"prompt": "say it", "completion": " yes"}] * 8
    ours = with_trl("SFT", out, tmp_path, data, max_length=32)
    stock = with_trl("SFT", out, tmp_path, data, made=trl.SFTTrainer, max_length=32)
    assert losses(ours) == losses(stock)
    assert losses(ours)[-1] < losses(ours)[0]


def test_dpo_trains_against_the_adapter_it_began_with(out: Path, tmp_path: Path) -> None:
    pairs = [{"prompt": f"say {i}", "chosen": " yes well", "rejected": " no never"} for i in range(8)]
    ours = with_trl("DPO", out, tmp_path, pairs)
    margins = [entry["rewards/margins"] for entry in ours.state.log_history if "rewards/margins" in entry]
    assert margins[0] == 0, "an adapter that begins as nothing is the reference itself"
    assert margins[1] > 0


def test_kto_trains(out: Path, tmp_path: Path) -> None:
    told = [{"prompt": f"say {i}", "completion": " yes well", "label": bool(i % 2)} for i in range(8)]
    assert len(losses(with_trl("KTO", out, tmp_path, told))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("base", ["GRPO", "RLOO"])
def test_trainers_that_generate_train(out: Path, tmp_path: Path, base: str) -> None:
    def longer_is_better(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(set(text))) for text in completions]

    prompts = [{"prompt": f"say {i}"} for i in range(8)]
    options = {"num_generations": 2, "max_completion_length": 6, "beta": 0.1, "reward_funcs": longer_is_better}
    before = trained(adapted(out))
    ours = with_trl(base, out, tmp_path, prompts, **options)
    assert not equal(trained(ours.model), before)


def test_other_trainers_of_trl_are_refused_by_name() -> None:
    trl = pytest.importorskip("trl")
    with pytest.raises(InputRefused) as error:
        type("KTRewardTrainer", (KTrainerMixin, trl.RewardTrainer), {})
    assert code(error) == "T535"
    assert "`trl.RewardTrainer`" in str(error.value)

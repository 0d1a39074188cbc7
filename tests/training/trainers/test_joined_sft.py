"""`KTSFTTrainer` runs the code around the layers once for several micro-batches, and logs what TRL does of each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from stacked_training import KeepGradients, peft_model, rows
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig

from ktc.training import KTSFTTrainer
from ktc.training.trainers import several_lengths, sft
from ktc.training.trainers.embed_and_head import EmbedAndHead
from ktc.training.trainers.stacking import Stacker, StackMode

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def package(package: Callable[[str], Path]) -> Path:
    return package("qwen3_moe")


class Sft(KTSFTTrainer):
    """With small chunks, so that only some micro-batches share one, and with its first gradients kept."""

    def __init__(self, *args: Any, mode: StackMode, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stacker = Stacker(self, mode, chunk_tokens=40 * self.args.per_device_train_batch_size)
        self.gradients: dict[str, Tensor] = {}
        self.add_callback(KeepGradients(self))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The micro-batches of each run that had a loss."""
    seen: list[int] = []
    stock = EmbedAndHead.losses

    def counted(self: Any, step: Any, batch: Any, *args: Any) -> Any:
        seen.append(batch.count)
        return stock(self, step, batch, *args)

    monkeypatch.setattr(EmbedAndHead, "losses", counted)
    return seen


def trained(
    out: Path,
    folder: Path,
    mode: StackMode,
    *,
    batch: int = 1,
    lengths: tuple[int, ...] = (17,) * 12,
    made: type[Sft] = Sft,
    dropout: float = 0.0,
    accumulation: int = 8,
    evaluated: tuple[int, ...] = (),
    given: dict[str, Any] | None = None,
    **settings: Any,
) -> Sft:
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(128)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w1", eos_token="w2")
    defaults: dict[str, Any] = {
        "num_train_epochs": 1,
        "gradient_checkpointing": False,
        "optim": "sgd",
        "router_aux_loss_coef": 0.0,
    }
    args = SFTConfig(
        str(folder), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation // batch,
        logging_steps=1, report_to=[], save_strategy="no", max_grad_norm=0.0, learning_rate=0.1, use_cpu=True,
        bf16=False, disable_tqdm=True, seed=3, **{**defaults, **settings},
    )  # fmt: skip
    held_out = Dataset.from_list(rows(evaluated)) if evaluated else None
    trainer = made(
        peft_model(out, dropout=dropout), args, mode=mode, train_dataset=Dataset.from_list(rows(lengths)),
        eval_dataset=held_out, processing_class=tokenizer, **(given or {}),
    )  # fmt: skip
    trainer.train()
    return trainer


TIMES = ("runtime", "per_second")


def logged(trainer: Sft) -> list[dict[str, float]]:
    """What the trainer logged, without times and without the norm that Trainer logs."""
    return [
        {key: value for key, value in entry.items() if not any(part in key for part in TIMES)}
        for entry in trainer.state.log_history
    ]


def assert_alike(ours: Sft, theirs: Sft) -> None:
    assert ours.stacker.decision is not None
    assert ours.stacker.decision.on, ours.stacker.decision.reason
    assert theirs.stacker.decision is None or not theirs.stacker.decision.on
    assert ours.gradients.keys() == theirs.gradients.keys()
    for name, expected in theirs.gradients.items():
        error = float((ours.gradients[name] - expected).norm() / expected.norm().clamp_min(1e-12))
        assert error < 1e-6, f"{name}: {error}"
    assert len(logged(ours)) == len(logged(theirs))
    for entry, expected in zip(logged(ours), logged(theirs), strict=True):
        assert entry == pytest.approx(expected, rel=2e-6)
    assert {"entropy", "mean_token_accuracy", "num_tokens", "loss"} <= logged(ours)[0].keys()


@pytest.mark.parametrize(
    "settings",
    [{}, {"batch": 2}, {"gradient_checkpointing": True}, {"lengths": (17, 17, 9, 9, 17, 17, 17, 17, 5, 9, 9, 9)}],
    ids=["rows", "pairs", "checkpointing", "lengths"],
)
def test_micro_batches_run_together_and_log_what_separate_ones_do(
    package: Path, tmp_path: Path, runs: list[int], settings: dict[str, Any]
) -> None:
    ours = trained(package, tmp_path, "on", evaluated=(17, 9, 12), eval_strategy="epoch", **settings)
    assert ours.stacker.decision is not None
    assert ours.stacker.decision.one_by_one == ""
    assert max(runs) > 1
    assert_alike(ours, trained(package, tmp_path, "off", evaluated=(17, 9, 12), eval_strategy="epoch", **settings))


def test_padded_layers_and_columns_log_what_separate_ones_do(
    package: Path, tmp_path: Path, chunks: list[list[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several_lengths, "_MULTIPLE", 8)
    lengths = (17, 17, 15, 15, 9, 9, 5, 5, 17, 17, 12, 12)
    ours = trained(package, tmp_path, "on", lengths=lengths)
    assert ours.stacker.decision is not None
    assert ours.stacker.decision.padded
    assert any(length % 8 == 0 for of_pass in chunks for _, length in of_pass)
    assert_alike(ours, trained(package, tmp_path, "off", lengths=lengths))


def test_the_head_knows_the_columns_of_a_padded_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two micro-batches of 5 and 4 tokens, 5 tokens of which are learned, in 16 columns."""
    asked: list[object] = []

    class Asked(Exception):
        pass

    def model(**inputs: Any) -> Any:
        raise Asked

    monkeypatch.setattr(sft, "with_all_positions", lambda utilities: asked.append(utilities) or nullcontext())
    losses = sft.SftLosses(SimpleNamespace())  # type: ignore[arg-type]
    losses._learned = 0.9
    for columns in (5, 16):
        with pytest.raises(Asked):
            losses._losses(2, [], (5, 4), model, {"input_ids": torch.zeros(2, columns)})
    assert len(asked) == 1, "9 of 10 positions, and 9 of 32"


def test_packed_rows_log_what_separate_ones_do(package: Path, tmp_path: Path, runs: list[int]) -> None:
    settings: dict[str, Any] = {"lengths": (9, 8, 5, 12) * 4, "packing": True, "max_length": 17, "accumulation": 4}
    ours = trained(package, tmp_path, "on", **settings)
    assert "rows have `cu_seq_lens_k`" in str(ours.stacker.decision)
    assert set(runs) == {1}
    assert_alike(ours, trained(package, tmp_path, "off", **settings))


def test_padded_rows_log_what_separate_ones_do(package: Path, tmp_path: Path, runs: list[int]) -> None:
    settings: dict[str, Any] = {"lengths": (9, 17) * 6, "batch": 2}
    ours = trained(package, tmp_path, "on", **settings)
    assert max(runs) == 1, "rows that differ in length within a micro-batch have masks, and it runs alone"
    assert_alike(ours, trained(package, tmp_path, "off", **settings))


def test_dropout_is_repeatable(package: Path, tmp_path: Path, runs: list[int]) -> None:
    first, second = (trained(package, tmp_path, "on", dropout=0.3) for _ in range(2))
    assert max(runs) > 1
    assert logged(first) == logged(second)
    for name, gradient in first.gradients.items():
        assert torch.equal(gradient, second.gradients[name])


class Doubled(Sft):
    """With a loss of its own."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().compute_loss(*args, **kwargs)


def squared(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return outputs.logits.float().square().mean() + 0 * labels.sum()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"made": Doubled}, "`Doubled` computes the loss itself"),
        ({"loss_type": "dft"}, "of the type `dft`"),
        ({"release": (1, 15)}, "the loss of TRL 1.16 is not known, that of 1.15 is"),
    ],
    ids=["own", "dft", "release"],
)
def test_other_losses_run_for_each_micro_batch(
    package: Path, tmp_path: Path, runs: list[int], monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], told: str
) -> None:
    settings = {"max_steps": 1, **settings}
    if release := settings.pop("release", None):
        monkeypatch.setattr(sft, "_KNOWN", release)
    ours = trained(package, tmp_path, "on", **settings)
    assert f"once per micro-batch: {told}" in str(ours.stacker.decision) or told in str(ours.stacker.decision)
    assert runs == [1] * 8
    assert_alike(ours, trained(package, tmp_path, "off", **settings))


@pytest.mark.parametrize("settings", [{"given": {"compute_loss_func": squared}}, {"label_smoothing_factor": 0.1}])
def test_losses_that_need_the_model_twice_are_not_stacked(
    package: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    ours, theirs = (trained(package, tmp_path, mode, max_steps=1, **settings) for mode in ("auto", "off"))
    assert "more than once per micro-batch" in str(ours.stacker.decision)
    assert logged(ours)[0] == pytest.approx(logged(theirs)[0], rel=2e-6)


def test_losses_without_learned_tokens_are_zero(package: Path, tmp_path: Path) -> None:
    """TRL's are, where transformers' are not numbers."""

    class Uncounted(Sft):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.model_accepts_loss_kwargs = False
            collate = self.data_collator

            def some_without_labels(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
                inputs = collate(batch)
                if int(inputs["input_ids"].sum()) % 3 == 0:
                    inputs["labels"][:] = -100
                return inputs

            self.data_collator = some_without_labels

        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            batches, _ = super().get_batch_samples(*args, **kwargs)
            return batches, None

    ours, theirs = (trained(package, tmp_path, mode, made=Uncounted) for mode in ("on", "off"))
    assert_alike(ours, theirs)


def test_a_kind_of_loss_that_is_set_after_a_step_is_computed(package: Path, tmp_path: Path, runs: list[int]) -> None:
    class Changed(Sft):
        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            self.args.loss_type = "dft" if self.state.global_step == 1 else "nll"
            return super().get_batch_samples(*args, **kwargs)

    settings: dict[str, Any] = {"made": Changed, "lengths": (17,) * 24, "max_steps": 3}
    ours = trained(package, tmp_path, "on", **settings)
    assert runs == [2] * 4 + [1] * 8 + [2] * 4
    assert_alike(ours, trained(package, tmp_path, "off", **settings))


@pytest.mark.parametrize("rows_are", ["learned", "few", "padded"])
def test_the_head_computes_all_positions_where_most_are_learned(
    package: Path, tmp_path: Path, runs: list[int], monkeypatch: pytest.MonkeyPatch, rows_are: str
) -> None:
    asked: list[str] = []

    def told(device: torch.device) -> bool:
        asked.append(device.type)
        return False

    few = [{**row, "labels": [-100] * 14 + row["labels"][14:]} for row in rows((17,) * 12)]
    monkeypatch.setattr(sft.utilities, "_use_triton", told)
    if rows_are == "few":
        monkeypatch.setitem(trained.__globals__, "rows", lambda lengths: few if lengths else [])
    trained(package, tmp_path, "on", max_steps=1, lengths=(2, 2, 18, 2) * 3 if rows_are == "padded" else (17,) * 12)
    assert max(runs) > 1
    assert bool(asked) == (rows_are != "learned")


class TurnsOn(Sft):
    """Turns the auxiliary loss of its routers on after a step."""

    by: str

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        if self.state.global_step > 0:
            config = self.accelerator.unwrap_model(model).config
            config.router_aux_loss_coef = self.router_aux_loss_coef = 0.5
            if self.by == "config":
                config.output_router_logits = True
            else:
                self.aux_loss_enabled = True
        return super().training_step(model, inputs, num_items_in_batch)


@pytest.mark.parametrize("by", ["config", "trainer"])
def test_an_auxiliary_loss_that_begins_in_mid_run_is_computed(
    package: Path, tmp_path: Path, runs: list[int], by: str
) -> None:
    made = type("TurnsOn", (TurnsOn,), {"by": by})
    ours = trained(package, tmp_path, "auto", made=made, lengths=(17,) * 16)
    assert max(runs) > 1
    theirs = trained(package, tmp_path, "off", made=made, lengths=(17,) * 16)
    assert ours.stacker.decision is not None
    assert "auxiliary loss" in ours.stacker.decision.reason
    for mine, stock in zip(logged(ours), logged(theirs), strict=True):
        assert mine == pytest.approx(stock, rel=1e-4)

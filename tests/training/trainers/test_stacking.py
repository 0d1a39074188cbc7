"""Micro-batches of a step in one pass over the experts: gradients, losses and logs are those of separate ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from stacked_training import LENGTHS, StackingTrainer, assert_alike, logged, padded, peft_model, rows, trained
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig

from ktc.diagnostics import InputRefused
from ktc.model.experts.module import FusedMoe
from ktc.tools.bench.plans.kinds import KindClock, TimedSteps
from ktc.training import KTSFTTrainer
from ktc.training.trainers import chunked_loss as chunked_loss_module
from ktc.training.trainers import step_passes
from ktc.training.trainers.layer_calls import ModelCall, divided
from ktc.training.trainers.split_layer import LayerCall
from ktc.training.trainers.stacking import Stacker, StackMode, reason_against

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("family", ["deepseek_v2", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_gradients_and_logged_losses_are_those_of_separate_micro_batches(
    package: Callable[[str], Path], tmp_path: Path, family: str, experts: bool
) -> None:
    assert_alike(*(trained(package(family), tmp_path, mode, experts=experts) for mode in ("on", "off")))


@pytest.mark.slow
def test_padded_batches_and_short_last_steps_are_theirs_too(package: Callable[[str], Path], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"batch": 2, "gradient_accumulation_steps": 3, "max_steps": 3}
    assert_alike(*(trained(package("qwen3_moe"), tmp_path, mode, **settings) for mode in ("on", "off")))


def positioned(batch: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Positions are one more input, which may say that rows hang together."""
    made = padded(batch)
    return {**made, "position_ids": torch.arange(made["input_ids"].shape[1]).expand(len(batch), -1)}


def packed(batch: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Two sequences in a row, told apart by their positions."""
    (row,) = batch
    ids, labels = torch.tensor([row["input_ids"] * 2]), torch.tensor([row["labels"] * 2])
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(len(row["input_ids"])).repeat(2)[None]}


def test_a_micro_batch_of_many_rows_is_several_chunks(package: Callable[[str], Path], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"batch": 4, "gradient_accumulation_steps": 2, "max_steps": 2}
    assert_alike(*(trained(package("qwen3_moe"), tmp_path, mode, **settings) for mode in ("on", "off")))
    x, shared, mask = torch.empty(4, 9, 2), torch.empty(1, 9, 3), torch.arange(4 * 9).view(4, 1, 9)
    layer = LayerCall(None, (shared,), {"mask": mask}, ())
    pieces = divided(ModelCall(x, (x.device,), (layer,)), 20)
    assert [piece.hidden.shape[0] for piece in pieces] == [2, 2]
    assert all(piece.layers[0].args[0] is shared for piece in pieces)
    assert torch.equal(torch.cat([piece.layers[0].kwargs["mask"] for piece in pieces]), mask)
    of_heads = LayerCall(None, (torch.empty(3, 9, 9),), {}, ())
    assert len(divided(ModelCall(x, (x.device,), (of_heads,)), 20)) == 1, "not one for each sequence"


@pytest.mark.parametrize("collate", [padded, positioned], ids=["rows", "other inputs"])
def test_a_micro_batch_larger_than_a_pass_is_divided_into_its_rows(
    package: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collate: Callable[..., Any]
) -> None:
    passed: list[int] = []

    class Scarce(StackingTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            ours = self.stacker
            run = ours._pass

            def counted(embed_and_head: Any, stock_step: Any, batches: Any, *args: Any) -> None:
                passed.append(sum(batch.inputs["input_ids"].numel() for batch in batches))
                run(embed_and_head, stock_step, batches, *args)

            monkeypatch.setattr(ours, "_pass", counted)

    settings: dict[str, Any] = {"batch": 4, "gradient_accumulation_steps": 2, "max_steps": 2, "collate": collate}
    expected = trained(package("qwen3_moe"), tmp_path, "off", **settings)
    monkeypatch.setattr(step_passes, "fitting_tokens", lambda *_: {"cpu": 50})
    found = trained(package("qwen3_moe"), tmp_path, "on", trainer=Scarce, **settings)
    assert_alike(found, expected)
    assert (max(passed) <= 50) == (collate is padded)
    told = "more tokens than a pass is divided into its rows"
    assert (told in str(found.stacker.decision)) == (collate is padded)


def test_packed_sequences_keep_their_positions(package: Callable[[str], Path], tmp_path: Path) -> None:
    assert_alike(*(trained(package("deepseek_v2"), tmp_path, mode, collate=packed) for mode in ("on", "off")))


def test_each_micro_batch_weighs_the_same_where_items_are_not_counted(
    package: Callable[[str], Path], tmp_path: Path
) -> None:
    class Uncounted(StackingTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.model_accepts_loss_kwargs = False

    runs = [trained(package("qwen3_moe"), tmp_path, mode, trainer=Uncounted) for mode in ("on", "off")]
    assert_alike(*runs)


@pytest.mark.slow
def test_gradient_checkpointing_changes_nothing(package: Callable[[str], Path], tmp_path: Path) -> None:
    assert_alike(
        trained(package("qwen3_moe"), tmp_path, "on", gradient_checkpointing=True),
        trained(package("qwen3_moe"), tmp_path, "off"),
    )


@pytest.mark.slow
def test_dropout_is_repeatable_and_the_same_in_what_is_computed_again(
    package: Callable[[str], Path], tmp_path: Path
) -> None:
    first, second = (trained(package("deepseek_v2"), tmp_path, "on", dropout=0.3) for _ in range(2))
    assert logged(first) == logged(second)
    assert all(torch.equal(grad, second.gradients[name]) for name, grad in first.gradients.items())


def test_each_layers_experts_are_called_once_per_step(
    package: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[int] = []
    forward = FusedMoe.forward

    def counted(self: FusedMoe, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        tokens.append(hidden_states.shape[0])
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(FusedMoe, "forward", counted)
    trainer = trained(package("qwen3_moe"), tmp_path, "on", max_steps=1)
    layers = sum(isinstance(module, FusedMoe) for module in trainer.model.modules())
    assert tokens == [sum(LENGTHS)] * layers


def test_timed_parts_have_seconds_of_every_kind_and_change_nothing(
    package: Callable[[str], Path], tmp_path: Path
) -> None:
    clock = TimedSteps(KindClock({}), first=0)

    class Timed(StackingTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.add_callback(clock)

    runs = [
        trained(package("qwen3_moe"), tmp_path, "on", trainer=kind, max_steps=3) for kind in (StackingTrainer, Timed)
    ]
    assert_alike(*runs)
    assert set(clock.medians) == {"attention", "mlp", "experts", "lm_head", "optimizer"}
    assert all(seconds > 0 for seconds in clock.medians.values())


def test_an_auxiliary_loss_turns_it_off_or_is_refused(package: Callable[[str], Path], tmp_path: Path) -> None:
    model = peft_model(package("qwen3_moe"))
    model.config.output_router_logits = True
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, gradient_accumulation_steps=2)
    trainer = StackingTrainer(model, args, mode="auto")
    assert "auxiliary loss" in reason_against(trainer, model)
    with pytest.raises(InputRefused) as refused:
        Stacker(trainer, "on").training_step(trainer.training_step, model, {})
    assert refused.value.diagnostics[0].code == "T540"


def test_a_trainer_that_calls_the_model_twice_goes_on_one_by_one(
    package: Callable[[str], Path], tmp_path: Path
) -> None:
    class Twice(StackingTrainer):
        def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(model, inputs, *args, **kwargs) + model(**inputs).loss

    ours, theirs = (trained(package("qwen3_moe"), tmp_path, mode, trainer=Twice) for mode in ("auto", "off"))
    assert ours.stacker.decision is not None
    assert "more than once" in ours.stacker.decision.reason
    assert logged(ours) == pytest.approx(logged(theirs), rel=1e-6)


def test_trl_counts_and_weighs_as_without(package: Callable[[str], Path], tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(128)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w1", eos_token="w2")
    args = SFTConfig(
        str(tmp_path), per_device_train_batch_size=1, gradient_accumulation_steps=8, max_steps=1, logging_steps=1,
        report_to=[], save_strategy="no", use_cpu=True, bf16=False, disable_tqdm=True, seed=3,
    )  # fmt: skip

    def entry(mode: StackMode) -> dict[str, float]:
        data, model = Dataset.from_list(rows()), peft_model(package("deepseek_v2"))
        trainer = KTSFTTrainer(model, args, train_dataset=data, processing_class=tokenizer, stack_micro_batches=mode)
        trainer.train()
        assert str(trainer.stacker.decision).startswith("stacked" if mode == "on" else "one by one")
        return trainer.state.log_history[0]

    assert entry("on") == pytest.approx(entry("off"), rel=1e-6)


def test_inputs_that_differ_when_asked_for_again_are_not_stacked(
    package: Callable[[str], Path], tmp_path: Path
) -> None:
    noisy = trained(package("qwen3_moe"), tmp_path, "auto", neftune_noise_alpha=5.0, max_steps=1)
    assert noisy.stacker.decision is not None
    assert not noisy.stacker.decision.on
    assert "differs when it is computed a second time" in noisy.stacker.decision.reason

    class Generating(StackingTrainer):
        def _prepare_inputs(self, inputs: Any) -> Any:
            raise AssertionError("not before its own step")

    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, gradient_accumulation_steps=2)
    trainer = Generating(peft_model(package("qwen3_moe")), args, mode="auto")
    assert "makes its inputs itself" in reason_against(trainer, trainer.model)


@pytest.mark.parametrize(
    ("settings", "own_loss", "whole"),
    [({}, None, False), ({"label_smoothing_factor": 0.1}, None, True), ({}, lambda *_, **__: None, True)],
    ids=["stock", "label smoothing", "a loss function"],
)
def test_a_loss_that_is_not_the_models_own_gets_whole_logits(
    package: Callable[[str], Path], tmp_path: Path, settings: dict[str, Any], own_loss: Any, whole: bool
) -> None:
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, **settings)
    trainer = Trainer(peft_model(package("qwen3_moe")), args, compute_loss_func=own_loss)
    assert bool(chunked_loss_module.reason_for_whole_logits(trainer)) == whole


def test_the_head_never_sees_more_tokens_than_a_chunk_has(
    package: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_loss_module, "MOST_LOGITS", 6 * 512)
    seen: list[int] = []

    class Watched(StackingTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            head = self.model.get_base_model().lm_head
            head.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[:-1].numel()))

    trainer = trained(package("qwen3_moe"), tmp_path, "on", trainer=Watched, max_steps=1)
    assert trainer.stacker.decision is not None
    assert trainer.stacker.decision.whole_loss == ""
    assert max(seen) * trainer.model.config.vocab_size <= 6 * 512


def test_a_head_whose_logits_are_changed_gets_them_whole(package: Callable[[str], Path], tmp_path: Path) -> None:
    class Scaled(StackingTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            model = self.model.get_base_model()
            stock = model.forward

            def scaled(*args: Any, labels: Tensor, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
                out = stock(*args, **kwargs)
                logits = out.logits / 2
                out.loss = model.loss_function(
                    logits=logits, labels=labels, vocab_size=512, num_items_in_batch=num_items_in_batch
                )
                return out

            model.forward = scaled

    ours, theirs = (trained(package("deepseek_v2"), tmp_path, mode, trainer=Scaled) for mode in ("on", "off"))
    assert_alike(ours, theirs)
    assert ours.stacker.decision is not None
    assert "changes the output of its head" in ours.stacker.decision.whole_loss
    assert "not computed in ktc's chunks" in str(ours.stacker.decision)


def test_losses_are_checked_once_in_a_step(package: Callable[[str], Path], tmp_path: Path) -> None:
    """The zeros of waiting micro-batches are not: a trainer reads two flags of each loss from the GPU."""
    checks: list[bool] = []

    class Watched(StackingTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            checks.append(self.args.logging_nan_inf_filter)
            return loss

    out = package("qwen3_moe")
    run = trained(out, tmp_path, "on", trainer=Watched)
    assert checks == ([False] * 7 + [True]) * 2
    assert run.args.logging_nan_inf_filter
    checks.clear()
    assert not trained(out, tmp_path, "on", trainer=Watched, logging_nan_inf_filter=False).args.logging_nan_inf_filter
    assert not any(checks)


def test_an_epoch_that_ends_within_a_step_is_evaluated_with_the_users_check(
    package: Callable[[str], Path], tmp_path: Path
) -> None:
    checks: list[bool] = []

    class AtTheEnd(TrainerCallback):
        def on_epoch_end(self, args: Any, *given: Any, **kwargs: Any) -> None:
            checks.append(args.logging_nan_inf_filter)

    class Stopping(StackingTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            if not checks and not self.control.should_epoch_stop:
                self.add_callback(AtTheEnd)
            self.control.should_epoch_stop = True
            return loss

    trained(package("qwen3_moe"), tmp_path, "on", trainer=Stopping)
    assert checks and all(checks)


def test_a_run_that_fails_in_a_step_leaves_its_arguments(package: Callable[[str], Path], tmp_path: Path) -> None:
    made: list[StackingTrainer] = []

    class Failing(StackingTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            made.append(self)
            if len(made) == 3:
                raise RuntimeError("lost")
            return super().training_step(*args, **kwargs)

    with pytest.raises(RuntimeError, match="lost"):
        trained(package("qwen3_moe"), tmp_path, "on", trainer=Failing)
    assert made[0].args.logging_nan_inf_filter

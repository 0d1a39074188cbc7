"""The trainers for compiled models: placement is theirs to keep, and a run that is resumed is the run."""

from __future__ import annotations

import copy
import io
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import ktc
from ktc.diagnostics import InputRefused, KtcError
from ktc.model.loading.peft_glue import read_lora_config
from ktc.tools.llama_factory import run as llama_factory
from ktc.training import KTrainer, KTrainerMixin, KTSFTTrainer
from ktc.training.trainers import finite_gradients, gradient_norm

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def out(compiled_twin: Callable[..., Path]) -> Path:
    return compiled_twin("tiny:qwen3_moe", "moe-lora")


def adapted(out: Path, *, dropout: float = 0.0, seed: int = 0, reference: bool = True) -> PeftModel:
    """The compiled model, in fp32 or with its kernels, with the adapter of its rules."""
    config = read_lora_config(out)
    config.lora_dropout = dropout
    model = ktc.load(out, reference=reference)
    torch.manual_seed(seed)
    found = get_peft_model(model, config)
    assert isinstance(found, PeftModel)
    return found


def rows(vocab_size: int, count: int = 16, length: int = 12) -> list[dict[str, Tensor]]:
    ids = torch.randint(3, vocab_size, (count, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in ids]


def settings(folder: Path, **options: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(output_dir=str(folder), **{**defaults, **options})


def trainer(model: nn.Module, folder: Path, **options: Any) -> KTrainer:
    return KTrainer(model=model, args=settings(folder, **options), train_dataset=rows(model.config.vocab_size))


def losses(trained: KTrainer) -> list[float]:
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def code(error: pytest.ExceptionInfo[InputRefused]) -> str:
    return error.value.diagnostics[0].code


def test_it_trains_as_the_stock_trainer_does(out: Path, tmp_path: Path) -> None:
    model = adapted(out)
    stock = Trainer(model=model, args=settings(tmp_path), train_dataset=rows(model.config.vocab_size))
    stock.train()
    ours = trainer(adapted(out), tmp_path)
    ours.train()
    assert losses(ours) == losses(stock)
    assert losses(ours)[-1] < losses(ours)[0]


def test_gradients_are_cleared_without_a_walk_through_all_modules(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks: list[int] = []
    left: list[bool] = []

    class Watched(KTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            left.append(any(parameter.grad is not None for parameter in self.model.parameters()))
            walks.append(0)
            return super().training_step(*args, **kwargs)

    stock = nn.Module.zero_grad
    monkeypatch.setattr(nn.Module, "zero_grad", lambda *given: walks.append(1) or stock(*given))
    model = adapted(out)
    stock_zero_grad = type(model).zero_grad
    Watched(model=model, args=settings(tmp_path), train_dataset=rows(model.config.vocab_size)).train()
    assert left == [False] * 4
    assert sum(walks[walks.index(0) :]) == 0
    assert type(model).zero_grad is stock_zero_grad


class Thawing(TrainerCallback):
    """Lets one factor train from the second step on."""

    def __init__(self, factor: nn.Parameter) -> None:
        self.factor, self.norms = factor.requires_grad_(False), list[float]()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.factor.requires_grad_(state.global_step > 0)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.norms.append(0.0 if self.factor.grad is None else float(self.factor.grad.norm()))


def test_a_parameter_that_starts_to_train_in_a_run_is_cleared_clipped_and_logged(out: Path, tmp_path: Path) -> None:
    runs: list[tuple[list[float], list[float]]] = []
    for kind in (Trainer, KTrainer):
        model = adapted(out)
        optimizer = torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr=1e-3)
        thawing = Thawing(next(value for name, value in model.named_parameters() if "lora_B" in name))
        run = kind(
            model=model, args=settings(tmp_path), train_dataset=rows(model.config.vocab_size), callbacks=[thawing],
            optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
        )  # fmt: skip
        run.train()
        runs.append((thawing.norms, [entry["grad_norm"] for entry in run.state.log_history if "grad_norm" in entry]))
    (stock_norms, stock_logged), (norms, logged) = runs
    assert norms == pytest.approx(stock_norms)
    assert logged == pytest.approx(stock_logged)
    assert norms[0] == 0 < norms[1]


class Copies(TrainerCallback):
    """Copies and pickles the model after a step."""

    def __init__(self, kinds: Sequence[Callable[[Any], Any]]) -> None:
        self.kinds, self.copies = kinds, list[Any]()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.copies = [kind(given["model"]) for kind in self.kinds]


@pytest.mark.parametrize("reference", [True, False])
def test_a_callback_may_copy_and_pickle_the_model(out: Path, tmp_path: Path, reference: bool) -> None:
    def pickled(model: nn.Module) -> Any:
        file = io.BytesIO()
        torch.save(model, file)
        return torch.load(io.BytesIO(file.getvalue()), weights_only=False)

    model = adapted(out, reference=reference)
    copies = Copies([copy.deepcopy, pickled] if reference else [copy.deepcopy])  # packed weights have no pickle (L435)
    run = KTrainer(
        model=model, args=settings(tmp_path, max_steps=1), train_dataset=rows(model.config.vocab_size),
        callbacks=[copies],
    )  # fmt: skip
    run.train()
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        for copied in copies.copies:
            assert torch.equal(copied.eval()(ids).logits, model.eval()(ids).logits)
    assert len(copies.copies) == 1 + reference
    assert not any(copied is model for copied in copies.copies)


def test_not_finite_gradients_of_a_parameter_that_starts_to_train_in_a_run_end_it(out: Path, tmp_path: Path) -> None:
    model = adapted(out)
    name, factor = next(pair for pair in model.named_parameters() if "lora_B" in pair[0])
    factor.register_hook(lambda gradient: gradient * math.nan)
    run = trainer(model, tmp_path)
    run.add_callback(Thawing(factor))
    with pytest.raises(KtcError, match=r"T548.*step 2: the gradient of") as error:
        run.train()
    assert name in error.value.diagnostics[0].message


class TwoGroups(Trainer):
    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        given = [parameter for parameter in model.parameters() if parameter.grad is not None]
        return torch.stack([self.accelerator.clip_grad_norm_(group, 1e-3) for group in (given[:4], given[4:])]).sum()


class ChangedBefore(Trainer):
    def _clip_grad_norm(self, model: nn.Module) -> Any:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.data.mul_(3)
        return super()._clip_grad_norm(model)


@pytest.mark.parametrize("base", [TwoGroups, ChangedBefore])
def test_a_trainer_that_clips_by_its_own_code_clips_as_without_the_mixin(
    out: Path, tmp_path: Path, base: type[Trainer]
) -> None:
    class Mixed(KTrainerMixin, base):  # type: ignore[misc, valid-type]
        pass

    logs: list[list[tuple[float, float]]] = []
    for kind in (base, Mixed):
        model = adapted(out)
        options = settings(tmp_path, max_steps=2, max_grad_norm=0.5, optim="sgd", learning_rate=1.0)
        run = kind(model=model, args=options, train_dataset=rows(model.config.vocab_size))
        run.train()
        logs.append([(entry["grad_norm"], entry["loss"]) for entry in run.state.log_history if "loss" in entry])
    assert logs[1] == [pytest.approx(step) for step in logs[0]]


class Copying(TrainerCallback):
    def __init__(self) -> None:
        self.copies: list[nn.Module] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.copies.append(copy.deepcopy(given["model"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.on_train_begin(args, state, control, **given)


def test_a_copy_of_the_model_in_training_clears_its_own_gradients(out: Path, tmp_path: Path) -> None:
    model, copying = adapted(out), Copying()
    run = trainer(model, tmp_path, max_steps=1)
    run.add_callback(copying)
    run.train()
    given = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    given.grad = torch.ones_like(given)
    assert len(copying.copies) == 2
    for copied in copying.copies:
        assert type(copied) is type(model)
        parameter = next(parameter for parameter in copied.parameters() if parameter.requires_grad)
        parameter.grad = torch.ones_like(parameter)
        copied.zero_grad()
        assert parameter.grad is None
    assert given.grad is not None


@pytest.mark.parametrize("kind", ["plain", "changed", "llama_factory"])
def test_the_norm_of_a_step_is_computed_once_unless_gradients_may_have_changed(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    class Doubling(KTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            for parameter in self.trained_parameters():
                assert parameter.grad is not None
                parameter.grad.data.mul_(2)
            return loss

    norms: list[float] = []
    stock = gradient_norm.total_norm
    for module in (gradient_norm, finite_gradients):
        monkeypatch.setattr(module, "total_norm", lambda given: norms.append(float(stock(given))) or stock(given))
    model = adapted(out)
    of_llama_factory = llama_factory._kt_trainer(type("Own", (Trainer,), {}), Event())
    kinds: dict[str, Any] = {"plain": KTrainer, "changed": Doubling, "llama_factory": of_llama_factory}
    run = kinds[kind](model=model, args=settings(tmp_path, max_steps=1), train_dataset=rows(model.config.vocab_size))
    run.train()
    logged = [entry["grad_norm"] for entry in run.state.log_history if "grad_norm" in entry]
    assert norms == pytest.approx([logged[0] / 2, logged[0]] if kind == "changed" else logged)


def test_nothing_moves_or_wraps_the_model(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = settings(tmp_path, max_steps=1)
    assert args.n_gpu <= 1
    monkeypatch.setattr(args, "_n_gpu", 2)  # as on a machine with two GPUs
    model = adapted(out)
    monkeypatch.setattr(model, "to", lambda *_, **__: pytest.fail("the model was moved"))
    ours = KTrainer(model=model, args=args, train_dataset=rows(model.config.vocab_size))
    ours.train()
    assert (args.n_gpu, ours._train_batch_size) == (1, 2)
    assert ours.model_wrapped is model


def test_a_model_that_is_not_compiled_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    with pytest.raises(InputRefused) as error:
        trainer(model, tmp_path)
    assert code(error) == "T530"


def test_training_without_an_adapter_is_refused(out: Path, tmp_path: Path) -> None:
    ours = trainer(ktc.load(out, reference=True), tmp_path)
    with pytest.raises(InputRefused) as error:
        ours.train()
    assert code(error) == "T531"


def test_sharding_is_refused(out: Path, tmp_path: Path) -> None:
    args = settings(tmp_path)
    args.deepspeed = "zero3.json"
    with pytest.raises(InputRefused) as error:
        KTrainer(model=adapted(out), args=args)
    assert code(error) == "T532"


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def equal(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


@pytest.mark.parametrize("experts", [False, True], ids=["attention", "experts"])
def test_a_resumed_run_is_the_uninterrupted_one(
    compiled_twin: Callable[..., Path], tmp_path: Path, experts: bool
) -> None:
    out = compiled_twin("tiny:qwen3_moe", "moe-experts-lora" if experts else "moe-lora")
    options: dict[str, Any] = {
        "max_steps": 6,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
    }
    dropout = 0.0 if experts else 0.3  # PEFT has no dropout on parameters
    whole = trainer(adapted(out, dropout=dropout), tmp_path / "whole", **options)
    whole.train()
    (tmp_path / "resumed").mkdir()
    shutil.copytree(tmp_path / "whole" / "checkpoint-3", tmp_path / "resumed" / "checkpoint-3")
    torch.manual_seed(99)
    resumed = trainer(adapted(out, dropout=dropout, seed=5), tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(whole)
    assert len(losses(whole)) == 6
    assert equal(trained(resumed.model), trained(whole.model))


def test_a_checkpoint_holds_the_adapter_and_not_the_base(out: Path, tmp_path: Path) -> None:
    ours = trainer(adapted(out), tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    ours.train()
    checkpoint = tmp_path / "checkpoint-1"
    assert not list(checkpoint.glob("model*"))
    saved = load_file(checkpoint / "adapter_model.safetensors")
    assert all("lora_" in name for name in saved)
    assert len(saved) == len(trained(ours.model))


def test_a_checkpoint_of_another_rank_is_refused_and_stays_whole(out: Path, tmp_path: Path) -> None:
    saved = trainer(adapted(out), tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    saved.train()
    checkpoint = tmp_path / "checkpoint-1"
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    lora = read_lora_config(out)
    lora.r *= 2
    ours = trainer(get_peft_model(ktc.load(out, reference=True), lora), tmp_path, max_steps=2)
    with pytest.raises(InputRefused) as error:
        ours.train(resume_from_checkpoint=True)
    (problem,) = error.value.diagnostics
    assert problem.code == "T524"
    assert f"checkpoint `{checkpoint}` does not fit this run" in problem.message
    assert "lora_A" in problem.message
    assert "has the shape" in problem.message
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before


def test_it_stops_early_and_goes_back_to_the_best(out: Path, tmp_path: Path) -> None:
    model = adapted(out)
    data = rows(model.config.vocab_size)
    options: dict[str, Any] = {
        "max_steps": 12,
        "learning_rate": 0.5,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # so that the best is not the last
        "report_to": ["tensorboard"],
    }
    ours = KTrainer(
        model=model,
        args=settings(tmp_path, **options),
        train_dataset=data,
        eval_dataset=data[:4],
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=1000)],
    )
    ours.train()
    assert ours.state.global_step == 3, "the first evaluation, and two that gain less than the threshold"
    best = Path(str(ours.state.best_model_checkpoint))
    assert best.name != "checkpoint-3", "going back must change something"
    saved = load_file(best / "adapter_model.safetensors")
    now = {name.replace(".default", ""): tensor for name, tensor in trained(ours.model).items()}
    assert equal(saved, now)
    assert list(tmp_path.rglob("events.out.tfevents.*")), "TensorBoard's log"


@pytest.mark.parametrize("options", [{"gradient_checkpointing": True}, {"bf16": True}], ids=["checkpointing", "bf16"])
def test_options_of_the_trainer_give_its_losses(out: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    plain, other = trainer(adapted(out), tmp_path), trainer(adapted(out), tmp_path, **options)
    plain.train()
    other.train()
    assert losses(other) == pytest.approx(losses(plain), abs=0.05 if "bf16" in options else 1e-6)


def test_the_generated_kernels_train_as_the_reference_does(out: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 4, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}

    def of(model: PeftModel) -> list[float]:
        same = rows(model.config.vocab_size, count=2) * 4  # in every step, so that the loss falls
        ours = KTrainer(model=model, args=settings(tmp_path, **options), train_dataset=same)
        ours.train()
        return losses(ours)

    found = of(adapted(out, reference=False))
    assert found == pytest.approx(of(adapted(out)), abs=0.05), "bf16 against fp32"
    assert found[0] - found[-1] > 0.25, "a tolerance must be smaller than what is learned"


# TRL


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


def test_a_damaged_checkpoint_is_refused_before_the_trainer_reads_it(out: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer(adapted(out), tmp_path, **options).train()
    state = tmp_path / "checkpoint-1" / "trainer_state.json"
    whole = state.read_text()
    state.write_text(whole.replace('"global_step": 1', '"global_step": -1'))
    again = trainer(adapted(out), tmp_path, **options)
    with pytest.raises(InputRefused, match="`global_step`") as error:
        again.train(resume_from_checkpoint=True)
    assert code(error) == "T524"
    state.write_text(whole)
    torch.save({"state": {}, "param_groups": [{"params": [0]}]}, tmp_path / "checkpoint-1" / "optimizer.pt")
    with pytest.raises(InputRefused, match="other parameters"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))

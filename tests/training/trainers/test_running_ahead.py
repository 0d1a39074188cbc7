"""A step is logged and checked while the next one is computed, and a run is the same as where the host waits."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_runs import adapted, equal, rows, settings, trained, trainer
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, masking_utils

from ktc.diagnostics import KtcError
from ktc.training import KTrainer
from ktc.training.trainers import fetch_ahead, skipped_update, stacking
from ktc.training.trainers.finite_gradients import GradientCheck
from ktc.training.trainers.split_layer import CannotStack
from ktc.training.trainers.stacking import Stacker

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def out(compiled_twin: Callable[..., Path]) -> Path:
    return compiled_twin("tiny:qwen3_moe", "moe-experts-lora")


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU counts as a device that computes by itself, and layers as replayed."""
    monkeypatch.setattr(skipped_update, "_DEVICES", {"cpu"})
    monkeypatch.setattr(Stacker, "replays", True)


def run(out: Path, folder: Path, kind: type[KTrainer] = KTrainer, **options: Any) -> KTrainer:
    model = adapted(out)
    options = {"gradient_accumulation_steps": 2, "max_steps": 6, "optim": "adamw_torch_fused", **options}
    made = kind(model=model, args=settings(folder, **options), train_dataset=rows(model.config.vocab_size))
    made.train()
    return made


def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens in a run: backward of layers, updates, logs, and the norms that are read."""
    events: list[str] = []

    def note(owner: Any, name: str, event: str) -> None:
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(event)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    note(stacking.torch.autograd, "backward", "backward")
    note(torch.optim.AdamW, "step", "update")
    note(Trainer, "log", "log")
    note(GradientCheck, "read", "read")
    return events


STEP = ["backward", "read", "backward", "log", "update"]  # of the loss, the step before, the layers


@pytest.mark.usefixtures("ahead")
def test_a_step_is_read_before_the_next_backward_and_logged_behind_it(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = noted(monkeypatch)
    run(out, tmp_path, max_steps=3)
    first = events.index("update") + 1
    assert [event for event in events[:first] if event in ("read", "log")] == []
    # every micro-batch of the first step has a loss of its own; the last step waits for its end
    steps = " ".join(events[first:]).replace("backward read", "read").split()
    assert [event for event in steps if event != "backward"] == ["read", "log", "update"] * 2 + ["read", "log", "log"]
    assert steps.index("read") < steps.index("backward") < steps.index("log"), "the layers' own backward"


def outcome(trained_run: KTrainer) -> list[dict[str, Any]]:
    times = ("train_runtime", "train_samples_per_second", "train_steps_per_second")
    return [{k: v for k, v in entry.items() if k not in times} for entry in trained_run.state.log_history]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logging_steps": 2, "save_strategy": "steps", "save_steps": 3},
        {"max_grad_norm": 0.05},
        {"max_grad_norm": 0.0, "max_steps": -1, "num_train_epochs": 2},
        {"logging_nan_inf_filter": False, "lr_scheduler_type": "cosine"},
    ],
)
def test_a_run_is_the_same(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    plain = run(out, tmp_path / "plain", **options)
    monkeypatch.setattr(skipped_update, "_DEVICES", {"cpu"})
    monkeypatch.setattr(Stacker, "replays", True)
    later: list[int] = []
    logs_later = KTrainer.logs_later.fget
    assert logs_later is not None
    monkeypatch.setattr(KTrainer, "logs_later", property(lambda self: later.append(logs_later(self)) or later[-1]))
    ours = run(out, tmp_path / "ahead", **options)
    assert any(later) and not all(later)
    assert outcome(ours) == outcome(plain)
    assert ours.state.total_flos == plain.state.total_flos
    assert equal(trained(ours.model), trained(plain.model))
    for folder in (tmp_path / "plain").glob("checkpoint-*"):
        both = (load_file(tmp_path / kind / folder.name / "adapter_model.safetensors") for kind in ("plain", "ahead"))
        assert equal(*both)


class Spoilt(KTrainer):
    """Keeps what trains before each step, and spoils one gradient of the third in backward."""

    value = math.nan

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        name, parameter = next(pair for pair in self.model.named_parameters() if "experts.lora_B" in pair[0])
        self.name = name

        def hook(gradient: Tensor) -> Tensor:
            if self.state.global_step == 2:
                gradient = gradient.clone()
                gradient[1, self.model.config.num_experts + 3] = self.value
            return gradient

        parameter.register_hook(hook)
        return super().create_optimizer(*args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        self.before = [*self.__dict__.get("before", []), trained(self.model)]
        return super().get_batch_samples(*args, **kwargs)


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize(("value", "kind"), [(math.nan, "NaN"), (math.inf, "infinite")])
@pytest.mark.parametrize("max_grad_norm", [1.0, 1e-3, 0.0])
def test_a_step_that_is_not_finite_is_not_taken(
    out: Path, tmp_path: Path, value: float, kind: str, max_grad_norm: float
) -> None:
    made: list[Spoilt] = []

    class Kept(Spoilt):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.value = value
            made.append(self)

    options = {"max_grad_norm": max_grad_norm, "save_strategy": "steps", "save_steps": 2}
    with pytest.raises(KtcError) as error:
        run(out, tmp_path, Kept, **options)
    (ours,) = made
    message = error.value.diagnostics[0].message
    assert error.value.diagnostics[0].code == "T548"
    for text in (f"step 3: the gradient of `{ours.name}`, of expert 3, is {kind}", str(tmp_path / "checkpoint-2")):
        assert text in message
    assert len(ours.before) == 4, "the next step had begun"
    assert not equal(ours.before[1], ours.before[2])
    assert equal(trained(ours.model), ours.before[2])
    states = ours.optimizer.optimizer.state.values()
    assert {float(state["step"]) for state in states} == {2.0}
    assert all(bool(state["exp_avg"].isfinite().all()) for state in states)
    assert [entry["step"] for entry in ours.state.log_history] == [1, 2]
    assert not hasattr(ours.optimizer.optimizer, "found_inf")


@pytest.mark.usefixtures("ahead")
def test_finite_gradients_of_an_infinite_norm_are_clipped_to_nothing_and_the_step_is_taken(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Large(Spoilt):
        value = 3e38

    ours = run(out, tmp_path / "ours", Large)
    monkeypatch.setattr(skipped_update, "_DEVICES", set())
    theirs = run(out, tmp_path / "theirs", Large)
    assert math.isinf(ours.state.log_history[2]["grad_norm"])
    assert outcome(ours) == outcome(theirs)
    assert equal(trained(ours.model), trained(theirs.model))


class Reading(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append(state.global_step)

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.steps.append(-1)


@pytest.mark.usefixtures("ahead")
def test_callbacks_of_others_come_where_they_do_without(out: Path, tmp_path: Path) -> None:
    reading, made = Reading(), trainer(adapted(out), tmp_path, max_steps=3, optim="adamw_torch_fused")
    made.add_callback(reading)
    made.train()
    assert reading.steps == [-1, 1, -1, 2, -1, 3, 3]


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("optim", ["sgd", "adamw_torch"])
def test_other_optimizers_have_their_gradients_checked_before(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optim: str
) -> None:
    events = noted(monkeypatch)
    run(out, tmp_path, max_steps=2, optim=optim)
    assert [event for event in events if event in ("read", "log")] == ["read", "log"] * 2 + ["log"]


def test_an_update_is_skipped_by_the_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skipped_update, "_DEVICES", {"cpu"})
    factor = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([factor], fused=True)
    factor.grad = torch.tensor([1.0, math.nan, 1.0])
    assert skipped_update.skips_alone(optimizer, [factor])
    assert bool(skipped_update.skip_unless_finite(optimizer, [factor], factor.grad.norm()))
    optimizer.step()
    assert factor.tolist() == [1.0] * 3 and float(optimizer.state[factor]["step"]) == 0
    skipped_update.skip_nothing(optimizer)
    factor.grad = torch.ones(3)
    assert not bool(skipped_update.skip_unless_finite(optimizer, [factor], factor.grad.norm()))
    optimizer.step()
    assert factor.tolist() != [1.0] * 3 and float(optimizer.state[factor]["step"]) == 1
    for other in (torch.optim.AdamW([factor]), torch.optim.SGD([factor], fused=True)):
        assert not skipped_update.skips_alone(other, [factor])
    monkeypatch.setattr(optimizer, "step", lambda: None)
    assert not skipped_update.skips_alone(optimizer, [factor]), "a step of others"


def test_nothing_is_read_later_where_layers_are_not_replayed(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skipped_update, "_DEVICES", {"cpu"})
    events = noted(monkeypatch)
    assert fetch_ahead.has_known_callbacks(run(out, tmp_path, max_steps=2))
    assert [event for event in events if event != "backward"] == ["update", "read", "log"] * 2 + ["log"]


@pytest.mark.parametrize(("kind", "asks"), [("stock", False), ("positions", True), ("own", True)])
def test_the_device_is_not_asked_whether_rows_are_packed_where_a_model_counts_positions(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, asks: bool
) -> None:
    class Own(KTrainer):
        def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(model, inputs, *args, **kwargs)

    asked: list[Tensor] = []
    stock = masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda ids: asked.append(ids) or stock(ids))
    model = adapted(out)
    data = [{name: row[name] for name in ("input_ids", "labels")} for row in rows(model.config.vocab_size)]
    if kind == "positions":
        data = [{**row, "position_ids": torch.arange(12) % 6} for row in data]
    options = settings(tmp_path, max_steps=2, gradient_accumulation_steps=2)
    (Own if kind == "own" else KTrainer)(model=model, args=options, train_dataset=data).train()
    assert bool(asked) == asks


@pytest.mark.usefixtures("ahead")
def test_a_run_ends_also_where_the_gradients_were_overwritten(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = GradientCheck.read

    def overwritten(check: GradientCheck) -> float:
        for _, gradient in check._pairs:
            gradient.zero_()
        return read(check)

    monkeypatch.setattr(GradientCheck, "read", overwritten)
    with pytest.raises(KtcError, match="T548: step 3: a gradient was not finite, and is not in memory any more"):
        run(out, tmp_path, Spoilt)


def unstacked_from(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Let stacking end in the middle of a run."""
    stock = Stacker._recorded

    def recorded(stacker: Any, *args: Any, **kwargs: Any) -> Any:
        if stacker._trainer.state.global_step == step:
            raise CannotStack("a test")
        return stock(stacker, *args, **kwargs)

    monkeypatch.setattr(Stacker, "_recorded", recorded)


def test_every_step_is_logged_once_where_stacking_ends_in_a_run(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unstacked_from(monkeypatch, 3)
    theirs = run(out, tmp_path / "theirs")
    monkeypatch.setattr(skipped_update, "_DEVICES", {"cpu"})
    monkeypatch.setattr(Stacker, "replays", True)
    ours = run(out, tmp_path / "ours")
    assert outcome(ours) == outcome(theirs)
    assert [entry["step"] for entry in ours.state.log_history] == [1, 2, 3, 4, 5, 6, 6]


def test_a_loss_that_is_not_finite_is_filtered_after_stacking_has_ended(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[bool] = []
    stock = Stacker.leave_check_out

    def leave(stacker: Stacker) -> None:
        stock(stacker)
        checks.append(stacker._trainer.args.logging_nan_inf_filter)

    monkeypatch.setattr(Stacker, "leave_check_out", leave)
    unstacked_from(monkeypatch, 2)
    run(out, tmp_path, max_steps=4)
    assert checks[:2] == [False] * 2 and checks[3:] == [True]


class Stream(IterableDataset[Any]):
    """Rows whose number is not known, so that no step knows that it is the last of an epoch."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Any:
        return iter(self.items)


def test_the_last_step_of_an_epoch_without_a_length_is_logged_and_saved_as_without(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[list[Any]] = []
    for ahead in (False, True):
        monkeypatch.setattr(Stacker, "replays", ahead)
        monkeypatch.setattr(skipped_update, "_DEVICES", {"cpu"} if ahead else set())
        model, folder = adapted(out), tmp_path / str(ahead)
        options = settings(
            folder, gradient_accumulation_steps=2, max_steps=9, optim="adamw_torch_fused", save_strategy="epoch"
        )
        KTrainer(model=model, args=options, train_dataset=Stream(rows(model.config.vocab_size))).train()
        states = [json.loads(path.read_text()) for path in sorted(folder.glob("*/trainer_state.json"))]
        saved.append([[state[name] for name in ("global_step", "total_flos", "log_history")] for state in states])
    assert saved[0] == saved[1]
    assert len(saved[0]) > 1 and all(flos > 0 for _, flos, _ in saved[0])


@pytest.mark.usefixtures("ahead")
def test_a_save_between_two_steps_has_the_log_of_the_first(out: Path, tmp_path: Path) -> None:
    class Saves(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                made._save_checkpoint(made.model, None)

    Saves.__module__ = "transformers.some_callback"
    model = adapted(out)
    options = settings(tmp_path, gradient_accumulation_steps=2, max_steps=5, optim="adamw_torch_fused")
    made = KTrainer(model=model, args=options, train_dataset=rows(model.config.vocab_size), callbacks=[Saves()])
    made.train()
    state = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"]] == [1, 2, 3]


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("kind", ["hook", "step"])
def test_code_of_others_in_an_optimizer_sees_no_gradient_that_is_not_finite(
    out: Path, tmp_path: Path, kind: str
) -> None:
    model = adapted(out)
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], fused=True)
    stock, seen = torch.optim.AdamW.step, list[bool]()

    def note(given: torch.optim.Optimizer, *_: Any) -> None:
        tensors = [value.grad for group in given.param_groups for value in group["params"] if value.grad is not None]
        seen.append(all(bool(gradient.isfinite().all()) for gradient in tensors))

    def step(given: Any, closure: Any = None) -> Any:
        note(given)
        return stock(given, closure)

    if kind == "hook":
        optimizer.register_step_pre_hook(note)
    else:
        optimizer.step = types.MethodType(step, optimizer)  # a schedule wraps it
    data, options = rows(model.config.vocab_size), settings(tmp_path, gradient_accumulation_steps=2)
    made = Spoilt(model=model, args=options, train_dataset=data, optimizers=(optimizer, None))
    with pytest.raises(KtcError, match="step 3: the gradient of"):
        made.train()
    assert seen == [True, True]


@pytest.mark.usefixtures("ahead")
def test_a_run_after_one_that_failed_logs_its_own_steps(out: Path, tmp_path: Path) -> None:
    model = adapted(out)
    options = settings(tmp_path, gradient_accumulation_steps=2, optim="adamw_torch_fused")
    made = Spoilt(model=model, args=options, train_dataset=rows(model.config.vocab_size))
    with pytest.raises(KtcError):
        made.train()
    made.name, made.value = "", 0.0
    made.train()
    assert [entry["step"] for entry in made.state.log_history] == [1, 2, 3, 4, 4]

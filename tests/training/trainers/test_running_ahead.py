"""A step is logged and checked while the next one is computed, and a run is the same as where the host waits."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_runs import adapted, equal, rows, settings, trained, trainer
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, masking_utils

from ktc.diagnostics import KtcError
from ktc.training import KTrainer
from ktc.training.trainers import fetch_ahead, skipped_update, stacking
from ktc.training.trainers.finite_gradients import GradientCheck
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

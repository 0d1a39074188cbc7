"""The gradients of a step are cleared, clipped, checked and logged once, as by the stock trainer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_runs import adapted, rows, settings, trainer
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from ktc.diagnostics import KtcError
from ktc.tools.llama_factory import run as llama_factory
from ktc.training import KTrainer, KTrainerMixin
from ktc.training.trainers import finite_gradients, gradient_norm, gradients

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def out(compiled_twin: Callable[..., Path]) -> Path:
    return compiled_twin("tiny:qwen3_moe", "moe-lora")


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
        monkeypatch.setattr(module, "total_norm", lambda given, **_: norms.append(float(stock(given))) or stock(given))
    model = adapted(out)
    of_llama_factory = llama_factory._kt_trainer(type("Own", (Trainer,), {}), Event())
    kinds: dict[str, Any] = {"plain": KTrainer, "changed": Doubling, "llama_factory": of_llama_factory}
    run = kinds[kind](model=model, args=settings(tmp_path, max_steps=1), train_dataset=rows(model.config.vocab_size))
    run.train()
    logged = [entry["grad_norm"] for entry in run.state.log_history if "grad_norm" in entry]
    assert norms == pytest.approx([logged[0] / 2, logged[0]] if kind == "changed" else logged)


def test_gradients_of_a_smaller_norm_are_not_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    factor = nn.Parameter(torch.zeros(2))
    factor.grad = torch.tensor([3.0, 4.0])
    scaled: list[float] = []
    monkeypatch.setattr(gradient_norm, "clip_grads_with_norm_", lambda _, most, __: scaled.append(most))
    with gradient_norm.known(gradient_norm.known_norm(torch.tensor(5.0), 5.0, [factor])):
        assert [float(gradient_norm.clip([factor], most)) for most in (6.0, 5.0, 4.0)] == [5, 5, 5]
    gradient_norm.clip([factor], 6.0)  # of a norm that is not known
    assert scaled == [5.0, 4.0, 6.0]


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_gradients_are_averaged_in_the_group_of_their_device(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU's backend they are summed and divided; only nccl knows the mean."""
    asked: list[tuple[Any, Any, Any]] = []

    def all_reduce(flat: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        asked.append((flat.dtype, op, group))

    calls: list[Any] = []
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: f"cpu:gloo,meta:{backend}")
    monkeypatch.setattr(gradients, "_present", lambda given, _, waits: (list(given), waits))
    monkeypatch.setattr(gradients, "in_one_call", lambda group: calls.append(group) or nullcontext())
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float32)
    parameters = [nn.Parameter(torch.zeros(2, dtype=dtype, device="meta")) for dtype in dtypes]
    parameters.append(nn.Parameter(torch.zeros(2)))
    for parameter in parameters[:-1]:
        parameter.grad = torch.ones_like(parameter)
    parameters[-1].grad = torch.full((2,), 8.0)
    gradients.average_gradients(parameters, {"cpu": "of the CPU", "meta": "of the device"})
    assert parameters[-1].grad.tolist() == [2.0, 2.0]
    op = dist.ReduceOp.AVG if backend == "nccl" else dist.ReduceOp.SUM
    if backend == "nccl":
        assert calls == ["of the device"] * 2, "one for each dtype that is summed"
        expected = [torch.float32] * 3 + [torch.float64, torch.float32]  # 16-bit values in fp32
        assert [dtype for dtype, *_ in asked] == expected
    else:
        assert not calls and len(asked) == 4, "those of a dtype together"
    assert {given[1:] for given in asked[:-1]} == {(op, "of the device")}
    assert asked[-1][1:] == (dist.ReduceOp.SUM, "of the CPU")


def test_the_order_of_a_call_does_not_depend_on_the_layout_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is another one in each process, while parameters are alike."""
    asked: list[list[tuple[int, ...]]] = []
    monkeypatch.setattr(dist, "all_reduce", lambda flat, *_, **__: asked[-1].append(tuple(flat.shape)))
    monkeypatch.setattr(gradients, "in_one_call", lambda group: nullcontext())
    for transposed in (False, True):
        parameters = [nn.Parameter(torch.zeros(3, 2).t()), nn.Parameter(torch.zeros(4, 5)), nn.Parameter(torch.ones(2))]
        for parameter in parameters:
            values = torch.arange(float(parameter.numel())).reshape(parameter.shape)
            parameter.grad = values.t().contiguous().t() if transposed else values
        asked.append([])
        gradients._average_together(parameters, {"cpu": None}, 1 << 20)
        assert parameters[1].grad.flatten().tolist() == list(map(float, range(20)))
    assert asked[0] == asked[1] == [(4, 5), (2,), (6,)]

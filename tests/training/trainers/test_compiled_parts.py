"""Layers compiled by parts: gradients of layers as they are, no compilation after the first step, refusals reported."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stacked_training import StackingTrainer, assert_alike, logged, trained
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.data import Sampler, SequentialSampler

from ktc.training.trainers.compiled_parts import CompiledParts
from ktc.training.trainers.stacking import Stacker, StackMode

pytestmark = pytest.mark.usefixtures("one_thread")


class Compiling(StackingTrainer):
    """With layers that are compiled as for a GPU, their compilations counted by step, and micro-batches in order."""

    backend = "eager"

    def __init__(self, *args: Any, mode: StackMode, **kwargs: Any) -> None:
        super().__init__(*args, mode=mode, **kwargs)
        torch.compiler.reset()
        self.counter = CompileCounterWithBackend(self.backend)
        self.parts = CompiledParts(self.counter, "cpu")
        self.stacker = Stacker(self, mode, chunk_tokens=40, compiled=self.parts)
        self.counted: list[int] = []

    def _get_train_sampler(self, *_: Any) -> Sampler[int]:
        return SequentialSampler(self.train_dataset)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            self.counted.append(self.counter.frame_count)
        return loss


class Lowered(Compiling):
    backend = "aot_eager"


class AsTheyAre(Compiling):
    def __init__(self, *args: Any, mode: StackMode, **kwargs: Any) -> None:
        super().__init__(*args, mode=mode, **kwargs)
        self.stacker = Stacker(self, mode, chunk_tokens=40)


def alike(out: Path, folder: Path, kind: type[Compiling], tolerance: float, **settings: Any) -> Compiling:
    ours, theirs = (trained(out, folder, "on", trainer=each, **settings) for each in (kind, AsTheyAre))
    assert isinstance(ours, Compiling)
    assert ours.parts.refused == {}
    assert ours.counted[0] > 0
    assert_alike(ours, theirs, tolerance)
    return ours


def test_gradients_are_those_of_layers_as_they_are_and_later_steps_compile_nothing(
    package: Callable[[str], Path], tmp_path: Path
) -> None:
    # in each step a chunk of one sequence and one of two, of other lengths
    lengths = (6, 6, 9, 4, 11, 13, 5, 5, 16, 3, 3, 8)
    settings: dict[str, Any] = {"gradient_accumulation_steps": 4, "max_steps": 3, "lengths": lengths}
    ours = alike(package("qwen3_moe"), tmp_path, Compiling, 1e-5, **settings)
    assert ours.counted == [ours.counted[0]] * 3
    inputs = [node for graph in ours.counter.graphs for node in graph.graph.nodes if node.op == "placeholder"]
    values = [node.meta["example_value"] for node in inputs]
    assert not [value for value in values if isinstance(value, Tensor) and value.dtype == torch.float64]  # no floats


@pytest.mark.slow
def test_one_variant_does_not_use_up_the_compilations_of_another(
    package: Callable[[str], Path], tmp_path: Path
) -> None:
    # chunks of one sequence and of two, forward without gradients and backward with them
    settings: dict[str, Any] = {"gradient_accumulation_steps": 4, "max_steps": 1, "lengths": (6, 6, 9, 4)}
    with torch._dynamo.config.patch(recompile_limit=1):  # `monkeypatch` would leave it without a value
        ours = trained(package("qwen3_moe"), tmp_path, "on", trainer=Compiling, **settings)
    assert ours.parts.refused == {}


@pytest.mark.parametrize("family", ["deepseek_v2", "qwen3_moe", "mixtral", "gpt_oss"])
def test_lowered_code_has_the_same_gradients(package: Callable[[str], Path], tmp_path: Path, family: str) -> None:
    alike(package(family), tmp_path, Lowered, 1e-5)


@pytest.mark.slow
def test_adapters_of_experts_are_trained_beside_compiled_parts(package: Callable[[str], Path], tmp_path: Path) -> None:
    alike(package("qwen3_moe"), tmp_path, Compiling, 1e-5, experts=True)


@pytest.mark.slow
def test_in_bf16_losses_differ_by_rounding_alone(package: Callable[[str], Path], tmp_path: Path) -> None:
    ours, theirs = (trained(package("qwen3_moe"), tmp_path, "on", bf16=True, trainer=k) for k in (Lowered, AsTheyAre))
    assert logged(ours) == pytest.approx(logged(theirs), rel=2e-3)


@pytest.mark.slow
def test_dropout_within_attention_is_repeated_and_repeatable(package: Callable[[str], Path], tmp_path: Path) -> None:
    def run(dropout: float) -> Compiling:
        made = trained(package("qwen3_moe"), tmp_path, "on", dropout=dropout, trainer=Lowered)
        assert isinstance(made, Compiling)
        assert made.parts.refused == {}
        return made

    first, second = run(0.3), run(0.3)
    assert logged(first) == logged(second)
    assert all(torch.equal(grad, second.gradients[name]) for name, grad in first.gradients.items())
    assert logged(first) != logged(run(0.0))


class Disturbed(Compiling):
    """With something in front of the layers' attention norm."""

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        for module in model.modules():
            if type(module).__name__.endswith("DecoderLayer"):
                module.input_layernorm = nn.Sequential(self.disturbance(), module.input_layernorm)
        super().__init__(model, *args, **kwargs)

    @staticmethod
    def disturbance() -> nn.Module:
        return nn.Dropout(0.2)


class Untraceable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x


@pytest.mark.parametrize(
    ("disturbance", "reason"),
    [(functools.partial(nn.Dropout, 0.2), "random numbers"), (Untraceable, "in `attend_and_route`: ")],
)
def test_layers_that_cannot_be_compiled_run_as_they_are_and_say_so(
    package: Callable[[str], Path],
    tmp_path: Path,
    disturbance: Callable[[], nn.Module],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Refused(Disturbed):
        @staticmethod
        def disturbance() -> nn.Module:
            return disturbance()

    class Plain(Refused, AsTheyAre):
        pass

    ours, theirs = (trained(package("qwen3_moe"), tmp_path, "on", trainer=kind) for kind in (Refused, Plain))
    assert_alike(ours, theirs)
    assert reason in ours.parts.refused["Qwen3MoeDecoderLayer"]
    assert "`Qwen3MoeDecoderLayer` is not compiled: " in str(ours.stacker.decision)
    assert len([record for record in caplog.records if "are not compiled" in record.message]) == 1


def test_layers_on_another_device_are_not_compiled(package: Callable[[str], Path], tmp_path: Path) -> None:
    class OfGpus(StackingTrainer):
        def __init__(self, *args: Any, mode: StackMode, **kwargs: Any) -> None:
            super().__init__(*args, mode=mode, **kwargs)
            self.stacker = Stacker(self, mode, compiled=CompiledParts())

    run = trained(package("qwen3_moe"), tmp_path, "on", trainer=OfGpus, max_steps=1)
    assert run.stacker.decision is not None
    assert run.stacker.decision.not_compiled == ""

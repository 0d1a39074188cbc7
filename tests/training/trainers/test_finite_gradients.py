"""A run ends at a gradient that is not a number, with its place and with its checkpoints whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import Trainer, TrainingArguments

import ktc
from ktc.diagnostics import KtcError
from ktc.model.loading.peft_glue import read_lora_config
from ktc.training import KTrainer, KTrainerMixin
from ktc.training.trainers import finite_gradients, gradient_norm
from ktc.training.trainers.gradient_norm import clip, total_norm

pytestmark = pytest.mark.usefixtures("one_thread")


def trainer(out: Path, folder: Path, **options: Any) -> KTrainer:
    torch.manual_seed(0)
    model = get_peft_model(ktc.load(out), read_lora_config(out))
    assert isinstance(model, PeftModel)
    ids = torch.randint(3, model.config.vocab_size, (16, 12), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=4, gradient_accumulation_steps=2, report_to=[], use_cpu=True,
        disable_tqdm=True, save_steps=1, **options,
    )  # fmt: skip
    return KTrainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids])


def spoil(ours: KTrainer, suffix: str, at: tuple[int, int], value: float, step: int) -> str:
    """Let the gradient of a parameter have `value` at one place in the last backward of a step; return its name."""
    name, parameter = next(pair for pair in ours.model.named_parameters() if pair[0].endswith(suffix))

    def hook(grad: Tensor) -> Tensor:
        if ours.state.global_step == step - 1:
            grad = grad.clone()
            grad[at] = value
        return grad

    parameter.register_hook(hook)
    return name


@pytest.mark.parametrize(
    ("suffix", "value", "said"),
    [
        ("experts.lora_B.default.weight", float("nan"), "of expert 3, is NaN"),
        ("experts.base_layer.lora_A.default.weight", float("inf"), "of expert 1, is infinite"),
        ("q_proj.lora_B.default.weight", float("nan"), "` is NaN"),
    ],
)
def test_the_place_is_named_and_the_last_checkpoint_is_whole(
    compiled_twin: Callable[..., Path], tmp_path: Path, suffix: str, value: float, said: str
) -> None:
    ours = trainer(compiled_twin("tiny:qwen3_moe", "moe-experts-lora"), tmp_path)
    rank = ours.model.peft_config["default"].r
    experts = ours.model.config.num_experts
    place = (rank + 1, 2) if "lora_A" in suffix else (1, experts + 3 if "experts" in suffix else 0)
    name = spoil(ours, suffix, place, value, step=3)
    with pytest.raises(KtcError) as error:
        ours.train()
    (problem,) = error.value.diagnostics
    assert problem.code == "T548"
    for text in ("step 3", name, said, str(tmp_path / "checkpoint-2")):
        assert text in problem.message
    saved = load_file(tmp_path / "checkpoint-2" / "adapter_model.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in saved.values())
    assert not (tmp_path / "checkpoint-3").exists()


@pytest.mark.parametrize("changes", [False, True])
def test_norms_that_backward_wrote_are_taken_where_no_step_may_have_changed_gradients(
    compiled_twin: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, changes: bool
) -> None:
    """A step of the user's own may change them by `.data`, which autograd does not see."""
    as_written: list[bool] = []

    def total(gradients: Any, **given: bool) -> Tensor:
        as_written.append(given["as_written"])
        return total_norm(gradients)

    monkeypatch.setattr(finite_gradients, "total_norm", total)
    ours = trainer(compiled_twin("tiny:qwen3_moe", "moe-experts-lora"), tmp_path)
    if changes:

        class Noisy(Trainer):
            def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
                return super().training_step(*args, **kwargs)

        ours.__class__ = type("Ours", (KTrainerMixin, Noisy), {})
    ours.args.max_steps, ours.args.save_strategy = 1, "no"
    ours.train()
    assert as_written == [not changes]


def test_the_norm_is_that_of_all_values_together() -> None:
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(*shape)) for shape in ((300, 256), (7,), (2, 3), (4, 300, 256))]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    exact = torch.cat([gradient.double().flatten() for gradient in gradients]).norm()
    torch.testing.assert_close(total_norm(gradients).double(), exact, rtol=1e-6, atol=0)
    before = [gradient.clone() for gradient in gradients]
    torch.testing.assert_close(clip(parameters, 1.0).double(), exact, rtol=1e-6, atol=0)
    for clipped, gradient in zip(gradients, before, strict=True):
        torch.testing.assert_close(clipped, gradient / float(exact), rtol=1e-5, atol=1e-8)
    gradients[3][1, 2, 3] = float("nan")
    assert not bool(total_norm(gradients).isfinite())


def test_norms_of_gradients_as_backward_has_written_them_are_not_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gradient_norm, "norm_of", lambda _: torch.tensor(3.0))
    gradients = [torch.zeros(4), torch.zeros(2)]
    assert float(total_norm(gradients, as_written=True)) == pytest.approx(18**0.5)
    assert float(total_norm(gradients)) == 0

"""Micro-batches of one length run through the code around the layers together, where that is the same as one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stacked_training import StackingTrainer, assert_alike, logged, padded, rows, trained
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import SequentialSampler
from transformers import Qwen3MoeForCausalLM, Trainer

from ktc.training.trainers.embed_and_head import EmbedAndHead
from ktc.training.trainers.joined_inputs import Batch, alike, all_alike, joined, rows_of
from ktc.training.trainers.layer_calls import ModelCall
from ktc.training.trainers.split_layer import LayerCall

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def package(package: Callable[[str], Path]) -> Path:
    return package("qwen3_moe")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each run of the code around the layers: recorded ones, and those with a loss."""
    seen: list[int] = []
    for name in ("record", "_run"):
        stock: Any = getattr(EmbedAndHead, name)

        def counted(self: Any, *args: Any, stock: Any = stock, **kwargs: Any) -> Any:
            inputs = next(given for given in args if isinstance(given, dict))
            seen.append(len(inputs["input_ids"]))
            return stock(self, *args, **kwargs)

        monkeypatch.setattr(EmbedAndHead, name, functools.wraps(stock)(counted))
    return seen


def plain(batch: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    return {name: torch.tensor([row[name] for row in batch]) for name in ("input_ids", "labels")}


@pytest.mark.parametrize("batch", [1, 2])
def test_rows_of_one_length_run_together_and_have_their_own_losses(
    package: Path, tmp_path: Path, runs: list[int], batch: int
) -> None:
    settings: dict[str, Any] = {"lengths": (17,) * 8, "batch": batch, "max_steps": 3}
    ours = trained(package, tmp_path, "on", **settings)
    of_chunks = [2] * 4
    first = [1] * 8 if batch == 1 else []
    assert runs == first + of_chunks * 2 * 3, "the first step records every micro-batch that is joined too"
    assert ours.stacker.decision is not None
    assert ours.stacker.decision.one_by_one == ""
    assert_alike(ours, trained(package, tmp_path, "off", **settings))


def test_means_of_micro_batches_are_theirs_where_items_are_not_counted(package: Path, tmp_path: Path) -> None:
    class Uncounted(StackingTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.model_accepts_loss_kwargs = False

    def one_without_labels(batch: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        inputs = plain(batch)
        if int(inputs["input_ids"].sum()) % 3 == 0:
            inputs["labels"][:] = -100  # its mean is NaN, which the trainer's log leaves out
        return inputs

    settings: dict[str, Any] = {"lengths": (17,) * 8, "collate": one_without_labels, "trainer": Uncounted}
    ours, theirs = (trained(package, tmp_path, mode, **settings) for mode in ("on", "off"))
    assert ours.stacker.decision is not None
    assert ours.stacker.decision.one_by_one == ""
    assert_alike(ours, theirs)


class Centred(nn.Module):
    """A module whose rows depend on each other."""

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.stock = stock

    def forward(self, x: Tensor) -> Tensor:
        made = self.stock(x)
        return made - made.mean((0, 1), keepdim=True)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda model: model.model.norm.register_forward_hook(lambda *_: None), "has hooks"),
        (lambda model: setattr(model.model.norm, "forward", model.model.norm.forward), "a `forward` of its own"),
        (lambda model: setattr(model.model, "norm", Centred(model.model.norm)), "model.norm` is not from"),
        (lambda model: setattr(model.model, "embed_tokens", Centred(model.model.embed_tokens)), "is not from"),
    ],
    ids=["hooks", "own forward", "own norm", "own embedding"],
)
def test_code_that_sees_micro_batches_sees_each_of_them(
    package: Path, tmp_path: Path, runs: list[int], change: Callable[[Any], object], told: str
) -> None:
    class Changed(StackingTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            change(self.model.get_base_model())

    ours = trained(package, tmp_path, "on", lengths=(17,) * 8, trainer=Changed, max_steps=1)
    assert runs == [1] * 16
    assert told in str(ours.stacker.decision)


def test_hooks_of_all_modules_see_each_micro_batch(package: Path, tmp_path: Path, runs: list[int]) -> None:
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        ours = trained(package, tmp_path, "on", lengths=(17,) * 8, max_steps=1)
    assert runs == [1] * 16
    assert "all modules have hooks" in str(ours.stacker.decision)


def test_code_that_another_package_puts_into_a_class_sees_each_micro_batch(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[int]
) -> None:
    @functools.wraps(nn.Embedding.forward)
    def forward(self: Any, x: Tensor, stock: Any = nn.Embedding.forward) -> Tensor:
        return stock(self, x)

    monkeypatch.setattr(nn.Embedding, "forward", forward)
    ours = trained(package, tmp_path, "on", lengths=(17,) * 8, max_steps=1)
    assert runs == [1] * 16
    assert "model.embed_tokens` is not from transformers" in str(ours.stacker.decision)


def test_trainers_with_a_loss_of_their_own_see_each_micro_batch(package: Path, tmp_path: Path, runs: list[int]) -> None:
    class Own(StackingTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    ours = trained(package, tmp_path, "on", lengths=(17,) * 8, trainer=Own, max_steps=1)
    assert runs == [1] * 16
    assert "once per micro-batch: `Own` computes the loss itself" in str(ours.stacker.decision)


@pytest.mark.parametrize("after", [0, 2], ids=["before the run", "after two steps"])
@pytest.mark.parametrize(
    ("name", "told"),
    [("compute_loss", "computes the loss itself"), ("backward", "a `backward` of its own")],
)
def test_functions_that_are_set_on_a_trainer_see_each_micro_batch(
    package: Path, tmp_path: Path, runs: list[int], name: str, told: str, after: int
) -> None:
    class Changed(StackingTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if not after:
                self.change()

        def change(self) -> None:
            of: Any = self if name == "compute_loss" else self.accelerator
            stock = getattr(of, name)
            setattr(of, name, lambda *args, **kwargs: stock(*args, **kwargs))

        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == after > 0:
                self.change()
            return super().get_batch_samples(*args, **kwargs)

    ours = trained(package, tmp_path, "on", lengths=(17,) * 8, trainer=Changed, max_steps=after + 1)
    joined_before = ([1] * 8 + [2] * 4 * 2 + [2] * 4 * 2) if after else []
    assert runs == joined_before + [1] * 16
    assert told in str(ours.stacker.decision)


def test_a_loss_that_is_put_into_the_trainers_class_sees_each_micro_batch(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[int]
) -> None:
    def compute_loss(self: Any, *args: Any, stock: Any = Trainer.compute_loss, **kwargs: Any) -> Any:
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "compute_loss", compute_loss)
    ours = trained(package, tmp_path, "on", lengths=(17,) * 8, max_steps=1)
    assert runs == [1] * 16
    assert "computes the loss itself" in str(ours.stacker.decision)


@pytest.mark.parametrize("known", [False, True])
def test_a_forward_that_computes_its_loss_itself_is_found_before_its_backward(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, known: bool
) -> None:
    stock: Any = Qwen3MoeForCausalLM.forward

    def fused(self: Any, labels: Any = None, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        made = stock(self, **kwargs, output_router_logits=False)
        logits = functional.linear(self.model.norm.last, self.lm_head.weight).flatten(0, 1).float()
        wanted = functional.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
        made.loss = functional.cross_entropy(logits, wanted, reduction="sum") / num_items_in_batch
        return made

    class Keeping(StackingTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            norm = self.model.get_base_model().model.norm
            call = type(norm).forward

            def forward(module: Any, x: Tensor) -> Tensor:
                module.last = call(module, x)
                return module.last

            monkeypatch.setattr(type(norm), "forward", forward)

    if known:  # as if it were a forward of transformers
        monkeypatch.setattr("ktc.training.trainers.joined_inputs.package_of", lambda _: "transformers")
    monkeypatch.setattr(Qwen3MoeForCausalLM, "forward", fused)
    settings: dict[str, Any] = {"lengths": (17,) * 8, "collate": plain, "trainer": Keeping}
    ours, theirs = (trained(package, tmp_path, mode, **settings) for mode in ("on", "off"))
    assert_alike(ours, theirs)
    assert "computes its loss itself" in str(ours.stacker.decision)


def inputs(rows: int, length: int, **others: Any) -> dict[str, Any]:
    ids = torch.arange(rows * length).view(rows, length)
    return {"input_ids": ids, "labels": ids, **others}


def test_only_whole_rows_of_one_length_are_joined() -> None:
    padding = torch.tensor([[1, 1, 0]])
    given = [
        inputs(1, 3), inputs(1, 3), inputs(1, 3), inputs(1, 4), inputs(1, 3, attention_mask=padding),
        inputs(1, 3, attention_mask=torch.ones(1, 3)), inputs(1, 3, position_ids=padding), inputs(2, 3), inputs(2, 3),
    ]  # fmt: skip
    batches, why = joined([given[:2], given[2:]], 12)
    assert [[batch.count for batch in of_pass] for of_pass in batches] == [[2], [1, 1, 1, 1, 1, 2]]
    assert why == "rows have padding"
    assert batches[1][-1].inputs["input_ids"].shape == (4, 3)
    assert joined([given[:3]], 8)[0][0][0].count == 2, "a batch has no more tokens than a chunk"
    assert joined([[inputs(1, 3, position_ids=padding)]], 8)[1] == "rows have `position_ids`"
    for one, row in zip(given[7:], rows_of(batches[1][-1]), strict=True):
        assert torch.equal(row["input_ids"], one["input_ids"])


def call(rows: int, mask: Tensor | None, first: float = 0.0) -> ModelCall:
    hidden = torch.arange(first, first + rows * 6).view(rows, 3, 2)
    kwargs = {"attention_mask": mask, "position_embeddings": (torch.ones(1, 3, 2), torch.ones(1, 3, 2)), "flag": True}
    of_layer = LayerCall(None, (), kwargs, ())
    return ModelCall(hidden, (torch.device("cpu"),) * 2, (of_layer, of_layer))


def test_a_batch_that_enters_the_layers_otherwise_is_found() -> None:
    mask = torch.ones(1, 1, 3, 3)
    assert alike(call(2, None), [call(1, None), call(1, None, 6.0)])
    assert alike(call(2, mask.repeat(2, 1, 1, 1)), [call(1, mask), call(1, mask, 6.0)])
    assert not alike(call(2, None), [call(1, None), call(1, None)]), "other states"
    assert not alike(call(2, mask), [call(1, None), call(1, None, 6.0)]), "a mask"
    assert not alike(call(2, torch.cat((mask, 1 - mask))), [call(1, mask), call(1, mask, 6.0)]), "another mask"
    moved = replace(call(1, None, 6.0), devices=(torch.device("meta"),) * 2)
    assert not alike(call(2, None), [call(1, None), moved])
    longer = [Batch(inputs(2, 4), 2)]
    assert not all_alike(longer, [call(2, None)], [call(1, None), call(1, None, 6.0)]), "tokens that the model adds"


def test_a_run_goes_on_one_by_one_where_batches_enter_the_layers_otherwise(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[int]
) -> None:
    monkeypatch.setattr("ktc.training.trainers.recorded_step.all_alike", lambda *_: False)
    ours = trained(package, tmp_path, "on", lengths=(17,) * 8, max_steps=2)
    assert runs == [1] * 8 + [2] * 4 + [1] * 8 + [1] * 16
    assert "several enter its layers otherwise than one" in str(ours.stacker.decision)
    assert logged(ours) == pytest.approx(logged(trained(package, tmp_path, "off", lengths=(17,) * 8)), rel=1e-6)


class InOrder(StackingTrainer):
    """Micro-batches are in the order of the data set."""

    def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
        return SequentialSampler(self.train_dataset)


def test_batches_are_compared_in_the_first_step_that_has_any(
    package: Path, tmp_path: Path, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktc.training.trainers.recorded_step.all_alike", lambda *_: False)
    of_several_lengths = tuple(range(21, 29))  # two of them are longer than a chunk
    ours = trained(package, tmp_path, "on", lengths=of_several_lengths + (17,) * 8, trainer=InOrder, max_steps=2)
    assert runs == [1] * 16 + [1] * 8 + [2] * 4 + [1] * 8
    assert "several enter its layers otherwise than one" in str(ours.stacker.decision)


def test_a_run_that_was_interrupted_in_its_first_step_begins_again(package: Path, tmp_path: Path) -> None:
    class Interrupted(StackingTrainer):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            good, bad = self.train_dataset, rows((17,) * 8)
            for row in bad[3:]:
                row["input_ids"][2] = 10**6  # no such token
            self.train_dataset = bad
            with pytest.raises(IndexError):
                super().train(*args, **kwargs)
            assert self.stacker.decision is None
            self.train_dataset = good
            return super().train(*args, **kwargs)

    ours = trained(package, tmp_path, "auto", lengths=(17,) * 8, trainer=Interrupted)
    assert_alike(ours, trained(package, tmp_path, "off", lengths=(17,) * 8))


def scarce(package: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> StackingTrainer:
    """A run with micro-batches of four rows, of which a pass holds one or two."""
    with monkeypatch.context() as patch:
        patch.setattr("ktc.training.trainers.step_passes.fitting_tokens", lambda *_: {"cpu": 40})
        return trained(package, folder, "on", lengths=(17,) * 8, batch=4, max_steps=1, **settings)


def test_a_micro_batch_whose_rows_depend_on_each_other_is_not_divided(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Changed(StackingTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            model = self.model.get_base_model().model
            model.norm = Centred(model.norm)

    ours = scarce(package, tmp_path, monkeypatch, trainer=Changed)
    theirs = trained(package, tmp_path, "off", lengths=(17,) * 8, batch=4, max_steps=1, trainer=Changed)
    assert_alike(ours, theirs)
    assert "is not divided into its rows: the code of `base_model" in str(ours.stacker.decision)


def test_a_micro_batch_that_enters_the_layers_otherwise_than_its_rows_is_not_divided(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[int]
) -> None:
    monkeypatch.setattr("ktc.training.trainers.recorded_step.all_alike", lambda *_: False)
    ours = scarce(package, tmp_path, monkeypatch)
    assert runs[-2:] == [4, 4]
    assert "its rows: they enter its layers otherwise" in str(ours.stacker.decision)


def test_rows_without_padding_need_no_mask_where_the_micro_batch_has_one() -> None:
    causal = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    padding = causal & torch.tensor([True, True, False])
    both = torch.cat((causal, padding))
    assert alike(call(2, both), [call(1, None), call(1, padding, 6.0)])
    assert not alike(call(2, both), [call(1, causal), call(1, None, 6.0)])


def test_the_reason_of_single_micro_batches_is_that_of_the_last_step(
    package: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def with_padding(batch: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        made = padded(batch)
        if len(batch[0]["input_ids"]) == 9:
            made["attention_mask"][:, 0] = 0
        return made

    settings: dict[str, Any] = {"collate": with_padding, "trainer": InOrder}
    with caplog.at_level("INFO", "ktc.training.trainers.stacking"):
        ours = trained(package, tmp_path, "on", lengths=(9,) + (17,) * 15, **settings)
    assert "for some micro-batches: rows have padding" in caplog.text
    assert "micro-batch" not in str(ours.stacker.decision).replace("a step's micro-batches", "")

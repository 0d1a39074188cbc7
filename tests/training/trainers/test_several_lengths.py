"""Micro-batches of several lengths run through the code around the layers as one batch, as they do one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stacked_training import StackingTrainer, assert_alike, padded, trained
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import SequentialSampler

from ktc.model.experts.module import FusedMoe
from ktc.training.trainers import chunked_loss, several_lengths, stacking, step_passes
from ktc.training.trainers.embed_and_head import EmbedAndHead
from ktc.training.trainers.joined_inputs import joined, rows_of, without_padding
from ktc.training.trainers.layer_calls import ModelCall
from ktc.training.trainers.several_lengths import (
    HiddenPadding,
    calls_of_each,
    frequencies_depend_on_length,
    has_parts,
)
from ktc.training.trainers.split_layer import LayerCall, SplitLayer
from ktc.training.trainers.stacking import Stacker
from ktc.training.trainers.step_passes import PassMemory, Stacking, StepSizes

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def package(package: Callable[[str], Path]) -> Path:
    return package("qwen3_moe")


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The shape of each batch that is recorded."""
    seen: list[tuple[int, int]] = []
    stock = EmbedAndHead.record

    def counted(self: Any, inputs: Any, num_items: Any) -> ModelCall:
        seen.append(tuple(inputs["input_ids"].shape))
        return stock(self, inputs, num_items)

    monkeypatch.setattr(EmbedAndHead, "record", counted)
    return seen


class InOrder(StackingTrainer):
    def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
        return SequentialSampler(self.train_dataset)


LENGTHS = (17, 17, 17, 17, 20, 12, 9, 5)
JOINED = [(2, 17), (2, 17), (2, 20), (2, 9)]
ON_GPU = [(3, 12), (2, 17), (2, 17), (1, 20)]  # in the order of their lengths, 40 tokens at most


@pytest.mark.parametrize("whole", [False, True], ids=["chunks", "whole logits"])
def test_losses_and_gradients_are_those_of_separate_micro_batches(
    package: Path, tmp_path: Path, shapes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, *, whole: bool
) -> None:
    settings: dict[str, Any] = {"lengths": LENGTHS, "trainer": InOrder, "max_steps": 2}
    if whole:  # found before the first backward

        def refusing(*_: Any, **__: Any) -> Any:
            raise chunked_loss.WholeLogits("for a test")

        monkeypatch.setattr(chunked_loss, "chunked_losses", refusing)
    ours = trained(package, tmp_path, "on", **settings)
    separate = [(1, length) for length in LENGTHS]
    assert shapes == separate + JOINED + (separate if whole else JOINED)
    assert_alike(ours, trained(package, tmp_path, "off", **settings))


def test_they_are_compared_in_the_first_step_that_has_any(
    package: Path, tmp_path: Path, shapes: list[tuple[int, int]]
) -> None:
    settings: dict[str, Any] = {"lengths": (17,) * 8 + LENGTHS * 2, "trainer": InOrder, "max_steps": 3}
    ours = trained(package, tmp_path, "on", **settings)
    first = [(1, 17)] * 8 + [(2, 17)] * 4
    assert shapes == first + [(1, length) for length in LENGTHS] + JOINED * 2
    assert_alike(ours, trained(package, tmp_path, "off", **settings))


def test_other_calls_end_them_and_not_those_of_one_length(
    package: Path, tmp_path: Path, shapes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktc.training.trainers.joined_inputs.calls_of_each", lambda *_: None)
    settings: dict[str, Any] = {"lengths": LENGTHS, "trainer": InOrder, "max_steps": 2}
    ours = trained(package, tmp_path, "on", **settings)
    of_one_length = [(2, 17), (2, 17), (1, 20), (1, 12), (1, 9), (1, 5)]
    assert shapes[-12:] == of_one_length * 2
    assert "for some micro-batches: those of several lengths" in str(ours.stacker.decision)
    assert_alike(ours, trained(package, tmp_path, "off", **settings))


def test_arguments_of_another_kind_end_them_after_a_step(
    package: Path, tmp_path: Path, shapes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Changed(InOrder):
        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 1:
                monkeypatch.setattr("ktc.training.trainers.several_lengths._dimensions", lambda *_: None)
            return super().get_batch_samples(*args, **kwargs)

    settings: dict[str, Any] = {"lengths": LENGTHS, "trainer": Changed, "max_steps": 2}
    ours = trained(package, tmp_path, "on", **settings)
    assert shapes[-10:] == [*JOINED, (2, 17), (2, 17), (1, 20), (1, 12), (1, 9), (1, 5)]
    assert "for some micro-batches: those of several lengths" in str(ours.stacker.decision)
    assert_alike(ours, trained(package, tmp_path, "off", **settings))


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """The shapes of the chunks of each pass, whose layers pad as on a GPU."""
    seen: list[list[tuple[int, int]]] = []
    stock = Stacker._through_layers

    def counted(self: Any, chunks: Any) -> Any:
        seen.append([tuple(chunk.hidden.shape[:2]) for chunk in chunks])
        return stock(self, chunks)

    monkeypatch.setattr(Stacker, "_through_layers", counted)
    monkeypatch.setattr(Stacker, "_launches", lambda *_: True)
    monkeypatch.setattr(several_lengths, "is_launched", lambda _: True)
    monkeypatch.setattr(several_lengths, "_MULTIPLE", 1)
    return seen


@pytest.mark.parametrize("experts", [False, True], ids=["attention", "experts"])
def test_layers_pad_where_launches_cost_more(
    package: Path, tmp_path: Path, chunks: list[list[tuple[int, int]]], *, experts: bool
) -> None:
    settings: dict[str, Any] = {"lengths": LENGTHS, "trainer": InOrder, "max_steps": 2, "experts": experts}
    ours = trained(package, tmp_path, "on", **settings)
    assert chunks == [ON_GPU] * 2
    assert "layers pad micro-batches of several lengths" in str(ours.stacker.decision)
    assert_alike(ours, trained(package, tmp_path, "off", **settings))


@pytest.mark.parametrize("causal", [True, False], ids=["padded layers", "own lengths"])
def test_lengths_of_a_gpu_are_multiples(
    package: Path, tmp_path: Path, chunks: list[list[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch, *, causal: bool
) -> None:
    monkeypatch.setattr(several_lengths, "_MULTIPLE", 8)
    monkeypatch.setattr(HiddenPadding, "of", lambda *_: causal)
    settings: dict[str, Any] = {"lengths": LENGTHS, "trainer": InOrder, "max_steps": 2}
    ours = trained(package, tmp_path, "on", **settings)
    of_one = [(1, 5), (1, 9), (2, 17), (2, 17), (1, 20)]
    assert chunks[-1] == (
        [(2, 16), (1, 12), (2, 17), (2, 17), (1, 20)] if causal else [*of_one[:2], (1, 12), *of_one[2:]]
    )
    assert ours.stacker.decision is not None
    assert ours.stacker.decision.padded is causal, "what a step has done"
    assert_alike(ours, trained(package, tmp_path, "off", **settings))


def test_experts_compute_no_padding(
    package: Path, tmp_path: Path, chunks: list[list[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[int] = []
    stock = FusedMoe.forward

    def counted(self: Any, hidden: Tensor, *args: Any) -> Tensor:
        tokens.append(len(hidden))
        return stock(self, hidden, *args)

    monkeypatch.setattr(FusedMoe, "forward", counted)
    trained(package, tmp_path, "on", lengths=LENGTHS, trainer=InOrder, max_steps=1)
    assert chunks == [ON_GPU]
    assert {*tokens} == {sum(LENGTHS)}


def test_layers_that_see_later_tokens_do_not_pad(
    package: Path, tmp_path: Path, chunks: list[list[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = stacking.split_layers

    def both_ways(model: nn.Module) -> Any:
        layers = stock(model)
        vars(layers[-1].attention)["is_causal"] = False
        return layers

    monkeypatch.setattr(stacking, "split_layers", both_ways)
    monkeypatch.setattr(step_passes, "with_padding", lambda *_: pytest.fail("memory for padding"))
    monkeypatch.setattr(stacking, "with_padding", lambda *_: pytest.fail("memory for padding"))
    made = trained(package, tmp_path, "on", lengths=LENGTHS, trainer=InOrder, max_steps=1)
    assert chunks == [[(1, 5), (1, 9), (1, 12), (2, 17), (2, 17), (1, 20)]]
    assert "pad" not in str(made.stacker.decision)


@pytest.mark.parametrize("other", ["a function of the trainer", "another run"])
def test_masks_of_other_code_are_looked_at_again(
    package: Path, tmp_path: Path, chunks: list[list[tuple[int, int]]], other: str
) -> None:
    forgotten: list[int] = []

    class Changed(InOrder):
        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            stock = HiddenPadding.forget
            padding = self.stacker._padding
            if padding is not None:
                padding.forget = lambda: forgotten.append(self.state.global_step) or stock(padding)
                if other == "a function of the trainer" and self.state.global_step == 1:
                    losses = self.compute_loss
                    self.compute_loss = lambda *given, **named: losses(*given, **named)
            return super().get_batch_samples(*args, **kwargs)

    made = trained(package, tmp_path, "on", lengths=LENGTHS, trainer=Changed, max_steps=3)
    assert forgotten == ([1] if other == "a function of the trainer" else [])
    if other == "another run":
        made.train()
        assert forgotten == [0]


def test_memory_is_planned_for_no_padding_where_micro_batches_are_not_joined(
    package: Path, tmp_path: Path, chunks: list[list[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class OwnLoss(InOrder):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    monkeypatch.setattr(stacking, "with_padding", lambda *_: pytest.fail("memory for padding"))
    made = trained(package, tmp_path, "on", lengths=LENGTHS, trainer=OwnLoss, max_steps=1)
    assert made.stacker.decision is not None and made.stacker.decision.one_by_one
    assert "pad" not in str(made.stacker.decision)


def test_masks_that_show_later_tokens_are_found() -> None:
    causal = nn.Identity()
    causal.is_causal = True  # type: ignore[assignment]
    layers = [SplitLayer(causal, causal, None)]
    hidden, past = torch.randn(2, 3, 4), torch.ones(2, 1, 3, 3).tril().bool()
    ahead = past.clone()
    ahead[0, 0, 0, 2] = True

    def of(*masks: Tensor) -> ModelCall:
        return ModelCall(hidden, (hidden.device,), (LayerCall(None, masks, {}, ()),))

    added = torch.zeros(past.shape).masked_fill(~past, torch.finfo(torch.float32).min)
    assert all(HiddenPadding(layers).of(of(*masks)) for masks in ([], [past], [added], [past, added]))
    assert not HiddenPadding(layers).of(of(past, ahead))
    assert not HiddenPadding(layers).of(of(torch.zeros(past.shape)))
    assert not HiddenPadding(layers).of(of(torch.zeros(past.shape, dtype=torch.int64))), "chosen positions, or another"
    found = HiddenPadding(layers)
    assert found.of(of(past)) and found.of(of(ahead)), "one that is as before"
    found.forget()
    assert not found.of(of(ahead))
    assert not HiddenPadding([SplitLayer(causal, nn.Identity(), None)]).of(of(past))


def test_padding_is_left_out_where_it_takes_another_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step of 40 + 8 tokens, 80 with padding."""
    monkeypatch.setattr(several_lengths, "_MULTIPLE", 1)
    sizes, memory = StepSizes((40, 8), 40), PassMemory({}, 0, 0)
    call = ModelCall(torch.empty(1, 40, 4), (torch.device("cpu"),), ())

    def found(room: int, chunk: int | None = None, given: StepSizes = sizes) -> Stacking:
        monkeypatch.setattr(step_passes, "fewest_passes", lambda *_: Stacking(True, "", room))
        return step_passes.with_padding((), call, given, memory, chunk)

    assert found(80).padded
    assert not found(79).padded
    assert not found(80, chunk=79).padded
    assert not found(80, given=StepSizes((40, 40), 40)).padded


def test_batches_of_a_gpu_pad_two_thousand_tokens_at_most() -> None:
    def sizes(*tokens: int, most: int = 8192) -> tuple[int, ...]:
        return StepSizes(tokens, max(tokens)).with_padding(most).tokens

    assert sizes(1024, 64, 128, 500) == (512, 512, 512, 1024)
    assert sizes(1024, 512, 512, 512) == (1024,) * 4
    assert sizes(1024, 512, 512, 512, most=4000) == (512, 512, 512, 1024)
    assert sizes(7, 7) == (7, 7)


def test_batches_of_several_rows_pad_the_length_of_each() -> None:
    def sizes(*shapes: tuple[int, int]) -> StepSizes:
        longest = max(length for _, length in shapes)
        tokens, rows = (rows * length for rows, length in shapes), (rows for rows, _ in shapes)
        return StepSizes(tuple(tokens), longest, rows=tuple(rows))

    more = sizes((4, 50), (4, 33)).with_padding(8192)
    assert (more.tokens, more.length) == ((256, 256), 64), "no multiple of 64 tokens, but of columns"
    other = sizes((4, 50), (2, 33), (2, 40)).with_padding(8192)
    assert (other.tokens, other.length) == ((128, 128, 200), 64)
    assert sizes((4, 50), (4, 33)).padded == 2 * 256
    assert sizes((4, 50), (4, 50)).padded == 400


def test_a_pass_with_padding_is_as_long_as_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def counted(_: Any, call: ModelCall, sizes: StepSizes, *args: Any) -> Stacking:
        asked.append((call.hidden.shape[1], sizes.length))
        return Stacking(True, "", 1000)

    monkeypatch.setattr(step_passes, "fewest_passes", counted)
    call = ModelCall(torch.empty(1, 40, 4), (torch.device("cpu"),), ())
    assert step_passes.with_padding((), call, StepSizes((40, 8), 40), PassMemory({}, 0, 0), None).padded
    assert asked == [(64, 64)]


def test_rotary_frequencies_of_a_length_are_found() -> None:
    plain, of_length, of_kinds = nn.Identity(), nn.Identity(), nn.Identity()
    plain.rope_type, of_length.rope_type = "yarn", "longrope"  # type: ignore[assignment]
    of_kinds.rope_type = {"sliding_attention": "default", "full_attention": "dynamic"}  # type: ignore[assignment]
    assert not frequencies_depend_on_length([plain, nn.Identity()])
    assert frequencies_depend_on_length([plain, of_length])
    assert frequencies_depend_on_length([of_kinds])


def inputs(rows: int, length: int) -> dict[str, Tensor]:
    ids = torch.arange(1, rows * length + 1).view(rows, length)
    return {"input_ids": ids, "labels": ids}


def test_padding_is_little_on_a_cpu() -> None:
    near, far = [inputs(1, 20), inputs(1, 30)], [inputs(1, 20), inputs(1, 53)]
    assert [batch.count for batch in joined([near], 100, of_several_lengths=True)[0][0]] == [2]
    assert [batch.count for batch in joined([far], 200, of_several_lengths=True)[0][0]] == [1, 1]
    assert [batch.count for batch in joined([near], 59, of_several_lengths=True)[0][0]] == [1, 1]


def test_rows_of_a_padded_batch_are_those_before() -> None:
    given = [inputs(2, 5), inputs(2, 3)]
    ((batch,),), _ = joined([given], 100, of_several_lengths=True)
    assert batch.lengths == (5, 3)
    assert batch.inputs["labels"][2:, 3:].eq(-100).all()
    for one, row in zip(given, rows_of(batch), strict=True):
        assert all(torch.equal(one[name], row[name]) for name in one)


def test_calls_are_cut_where_it_is_known_how() -> None:
    hidden, turned = torch.randn(4, 5, 2), torch.randn(1, 5, 3)
    mask = torch.ones(4, 1, 5, 5).tril()
    of_layer = LayerCall(None, (mask,), {"positions": torch.arange(5), "embedded": (turned, turned), "flag": None}, ())
    call = ModelCall(hidden, (torch.device("cpu"),) * 2, (of_layer, of_layer))
    parts = calls_of_each(call, (5, 3))
    assert parts is not None
    assert has_parts(call)
    second = parts[1]
    assert torch.equal(second.hidden, hidden[2:, :3])
    assert second.layers[0] is second.layers[1]
    assert torch.equal(second.layers[0].args[0], mask[2:, :, :3, :3])
    embedded = second.layers[0].kwargs["embedded"]
    assert torch.equal(embedded[0], turned[:, :3])
    assert embedded[0] is embedded[1]
    assert second.layers[0].kwargs["positions"].tolist() == [0, 1, 2]
    for other in (torch.ones(4, 1, 5, 6), torch.ones(2, 5), torch.ones(7), torch.ones(4, 1, 1, 5, 5)):
        unknown = ModelCall(hidden, call.devices[:1], (LayerCall(None, (other,), {}, ()),))
        assert not has_parts(unknown)
        assert calls_of_each(unknown, (5, 3)) is None


def test_padding_to_a_multiple_is_left_out(package: Path, tmp_path: Path, shapes: list[tuple[int, int]]) -> None:
    def to_multiple(batch: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        made, fill = padded(batch), {"input_ids": 0, "labels": -100, "attention_mask": 0}
        missing = -len(batch[0]["input_ids"]) % 8
        return {name: functional.pad(value, (0, missing), value=fill[name]) for name, value in made.items()}

    settings: dict[str, Any] = {"lengths": LENGTHS, "trainer": InOrder, "max_steps": 2, "collate": to_multiple}
    ours = trained(package, tmp_path, "on", **settings)
    assert shapes == [(1, length) for length in LENGTHS] + JOINED * 2
    assert_alike(ours, trained(package, tmp_path, "off", **settings))


def test_columns_with_a_token_or_a_label_stay() -> None:
    ids = torch.arange(1, 11).view(2, 5)
    none = torch.full_like(ids, -100)
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 1, 0, 0]])
    label = none.clone()
    label[0, 3] = 7
    given = [
        {"input_ids": ids, "labels": none, "attention_mask": mask},
        {"input_ids": ids, "labels": label, "attention_mask": mask},
        {"input_ids": ids, "labels": none, "attention_mask": torch.zeros_like(mask)},
        {"input_ids": ids, "labels": none},
        {"input_ids": ids, "labels": none, "attention_mask": mask, "position_ids": ids},
    ]
    assert [made["input_ids"].shape[1] for made in without_padding(given)] == [3, 4, 5, 5, 5]
    assert without_padding(given[3:]) == given[3:]


def test_padding_inside_of_a_micro_batch_stays_one_by_one(
    package: Path, tmp_path: Path, shapes: list[tuple[int, int]]
) -> None:
    settings: dict[str, Any] = {"lengths": (17, 9) * 4, "batch": 2, "collate": padded, "trainer": InOrder}
    ours = trained(package, tmp_path, "on", max_steps=1, **settings)
    assert shapes == [(2, 17)] * 4
    assert "rows have padding" in str(ours.stacker.decision)

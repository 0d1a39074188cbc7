"""Micro-batches of a step in one pass over the experts: gradients, losses and logs are those of separate ones."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from stacked_training import LENGTHS, StackingTrainer, assert_alike, logged, padded, peft_model, rows, trained
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments
from trl import SFTConfig

from ktc.diagnostics import InputRefused
from ktc.model import twin
from ktc.model.experts.backend import Offload
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.stream_sizes import result_bytes
from ktc.model.experts.streamed_backend import Streamed
from ktc.stages.link import link
from ktc.tools.bench.plans.kinds import KindClock, TimedSteps
from ktc.training import KTSFTTrainer
from ktc.training.trainers import chunked_loss as chunked_loss_module
from ktc.training.trainers import stacking
from ktc.training.trainers.layer_calls import ModelCall, divided, in_chunks, record
from ktc.training.trainers.layer_parts import LayerRun
from ktc.training.trainers.layer_pass import Kept, Offloaded, through_layers
from ktc.training.trainers.split_layer import CannotStack, LayerCall, split_layers
from ktc.training.trainers.stack_size import (
    bytes_per_token,
    fitting_chunk,
    fitting_tokens,
    kept_bytes_per_token,
    kept_layers,
)
from ktc.training.trainers.stacking import Stacker, StackMode, StepSizes, passes, reason_against

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def package(hand_made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`package(family)`: a small model of it, compiled by hand, whose experts are their PyTorch reference."""

    @functools.cache
    def made(family: str) -> Path:
        source = twin.write(family, tmp_path_factory.mktemp("models"))
        return link(hand_made.package(source), tmp_path_factory.mktemp("build") / family)

    return made


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
    monkeypatch.setattr(stacking, "fitting_tokens", lambda *_: {"cpu": 50})
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


def test_a_pass_has_no_more_tokens_than_fit() -> None:
    sizes = (5, 5, 5, 9, 2)
    assert list(passes(sizes, 10)) == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert list(passes(sizes, 100)) == [(0, 5)]
    held, free = {"cuda:0": 100, "cpu": 50}, {"cuda:0": 20000, "cpu": 10000}
    assert fitting_tokens(held, {"cuda:0": 1000}, free) == {"cuda:0": 150, "cpu": 160}


def test_a_chunk_of_attention_is_what_memory_leaves_beside_the_pass() -> None:
    gpu, width, loss = torch.device("cuda:0"), 2048, 300 << 20
    held, tokens = {"cuda:0": 9 * 2 * 2 * width, "cpu": 1}, 16 * 512

    def chunk(room: int, tokens: int = tokens, device: torch.device = gpu) -> int:
        call = ModelCall(torch.empty(1, 512, width, dtype=torch.bfloat16), (device,), ())
        free = {"cuda:0": int((held["cuda:0"] * tokens + loss + room) / 0.8) + 1, "cpu": 1 << 40}
        return fitting_chunk(call, held, free, loss, tokens)

    per_token = 34 * width
    assert [chunk(per_token * each) for each in (8192, 8191, 4096, 4095, 0)] == [8192, 4096, 4096, 2048, 2048]
    assert chunk(per_token * 100_000, tokens=100_000) == 8192, "more memory stays free"
    assert chunk(per_token * 3000, tokens=3000) == 8192, "a chunk that holds the whole pass"
    assert chunk(per_token * 8192, device=torch.device("cpu")) == 2048


def test_what_layers_leave_on_the_device_is_two_hidden_states_each(package: Callable[[str], Path]) -> None:
    """Beside what their experts save, which with a kernel lies on the host."""
    model = peft_model(package("qwen3_moe"))
    model.train()
    layers = split_layers(model)
    ids = rows((64,))[0]["input_ids"]
    calls = [record(layers, lambda: model(input_ids=torch.tensor([ids]), use_cache=False)) for _ in range(4)]
    chunks = [chunk for chunk, _ in in_chunks(calls, 128)]
    assert [chunk.hidden.shape[0] for chunk in chunks] == [2, 2]
    for module in model.modules():
        if isinstance(module, FusedMoe):
            module.forward = torch.no_grad()(module.forward)
    saved: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t):
        through_layers(layers, chunks)
    width = model.config.hidden_size * 4
    tokens = 4 * 64
    on_device = sum(tensor.nbytes for tensor in saved.values() if tensor.ndim == 3)
    on_host = {tensor.untyped_storage().data_ptr(): tensor for tensor in saved.values() if tensor.ndim == 2}
    assert on_device == len(layers) * 2 * width * tokens, "a layer's input and what its attention gave"
    assert sum(each.untyped_storage().nbytes() for each in on_host.values()) == len(layers) * width * tokens
    held = bytes_per_token(layers, calls[0])["cpu"]
    assert held >= (on_device + len(layers) * width * tokens) / tokens


def test_rows_of_other_processes_count_where_they_share_experts() -> None:
    alone, sharing = (result_bytes(64, 8, 2, processes) for processes in (1, 4))
    assert sharing - alone == 3 * 12 * 64, "inputs, sums and gradients of their rows; choices are divided"


def test_experts_of_a_gpu_leave_states_alone_on_the_host(
    package: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = peft_model(package("qwen3_moe"))
    layers = split_layers(model)
    ids = rows((64,))[0]["input_ids"]
    call = record(layers, lambda: model(input_ids=torch.tensor([ids]), use_cache=False))
    width = call.hidden.shape[-1]
    for module in model.modules():
        if isinstance(module, FusedMoe):
            backend: Any = Streamed(None, module.form, (torch.device("cuda:0"),))  # type: ignore[arg-type]
            monkeypatch.setattr(module, "backend", lambda tokens, backend=backend: backend)
    held = bytes_per_token(layers, call)
    item, choices = call.hidden.element_size(), next(m.top_k for m in model.modules() if isinstance(m, FusedMoe))
    assert held == {"cpu": (len(layers) * (2 + 2) + 3) * width * item, "cuda:0": (12 + choices * item) * width}


def test_states_of_a_gpu_wait_on_the_host_where_a_pass_would_not_fit(package: Callable[[str], Path]) -> None:
    model = peft_model(package("qwen3_moe"))
    layers = split_layers(model)
    ids = rows((64,))[0]["input_ids"]
    call = record(layers, lambda: model(input_ids=torch.tensor([ids]), use_cache=False))
    width = call.hidden.shape[-1] * call.hidden.element_size()
    on_gpu = ModelCall(call.hidden, (torch.device("cuda:0"),) * len(layers), call.layers)
    held = {level: bytes_per_token(layers, on_gpu, level) for level in Offloaded}
    states = {level: sizes["cuda:0"] // width - 3 for level, sizes in held.items()}  # without the last output's
    assert states == {Offloaded.NOTHING: 2 * len(layers), Offloaded.ATTENTION: len(layers) + 4, Offloaded.INPUT: 8}
    assert held[Offloaded.INPUT]["cpu"] == held[Offloaded.NOTHING]["cpu"] + len(layers) * width
    assert bytes_per_token(layers, call, Offloaded.INPUT) == bytes_per_token(layers, call)
    fused = [module for module in model.modules() if isinstance(module, FusedMoe)]
    for resident, kept in ((False, {}), (True, {"cuda:0": 2 * len(fused) * width})):
        for module in fused:
            module.offload = Offload((torch.device("cuda:0"),), min_tokens=1, resident=resident)
        assert kept_bytes_per_token(layers, on_gpu) == kept
        assert kept_layers(layers, on_gpu, 10, {"cuda:0": 1 << 40}) == (len(layers) if resident else 0)
        assert kept_bytes_per_token(layers, call) == {}, "on another device than its layer"
        assert kept_layers(layers, call, 10, {"cuda:0": 1 << 40, "cpu": 1 << 40}) == 0
    gate_up = fused[-1].top_k * 2 * fused[-1].intermediate * call.hidden.element_size()
    of_layer = 10 * (34 * call.hidden.shape[-1] + gate_up)
    assert [kept_layers(layers, on_gpu, 10, {"cuda:0": size}) for size in (of_layer - 1, of_layer)] == [0, 1]


@pytest.mark.parametrize("parts", [1, 2])
def test_layers_whose_graph_is_kept_are_computed_once_with_the_same_gradients(
    package: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    calls: list[None] = []
    attend = LayerRun.attend_and_route

    def counted(self: LayerRun, x: Tensor) -> Any:
        calls.append(None)
        return attend(self, x)

    monkeypatch.setattr(LayerRun, "attend_and_route", counted)
    theirs = trained(package("qwen3_moe"), tmp_path, "on", experts=True)
    before, sized = len(calls), Stacker._sized
    monkeypatch.setattr(Stacker, "_sized", lambda *given: replace(sized(*given), kept=Kept(False, parts)))
    ours = trained(package("qwen3_moe"), tmp_path, "on", experts=True)
    assert_alike(ours, theirs)
    layers = theirs.model.config.num_hidden_layers
    assert (len(calls) - before) * 2 * layers == before * (2 * layers - parts)
    assert f"the last {parts} layers without computing them again" in str(ours.stacker.decision)


def _recorded(package: Callable[[str], Path], tmp_path: Path) -> tuple[Stacker, ModelCall, PeftModel]:
    """A stacker before its first decision, and the call of a micro-batch of eight tokens."""
    model = peft_model(package("qwen3_moe"))
    stacker = Stacker(Trainer(model, TrainingArguments(report_to=[], output_dir=str(tmp_path), use_cpu=True)))
    stacker._layers = split_layers(model)
    ids = torch.tensor([rows((8,))[0]["input_ids"]])
    call = record(stacker._layers, lambda: model(input_ids=ids, use_cache=False))
    return stacker, call, model


@pytest.mark.parametrize(
    ("per_token", "tokens", "level"),
    [
        ((40, 20, 10), 1000, Offloaded.NOTHING),
        ((40, 20, 10), 64 * 30 // 40, Offloaded.ATTENTION),
        ((40, 20, 10), 64 * 15 // 40, Offloaded.INPUT),
        ((40, 40, 40), 64 * 15 // 40, Offloaded.NOTHING),  # nothing is gained
        ((40, 39, 38), 64 * 15 // 40, Offloaded.NOTHING),  # as many passes
    ],
)
def test_the_least_waits_that_saves_a_pass(
    per_token: tuple[int, ...], tokens: int, level: Offloaded, package: Callable[[str], Path],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """`tokens` fit with nothing in host memory, of 64 that a step has; each kind takes so many bytes per token."""
    fits = {held: tokens * per_token[0] // held for held in per_token}
    monkeypatch.setattr(stacking, "bytes_per_token", lambda *given: {"cpu": per_token[given[2]]})
    monkeypatch.setattr(stacking, "fitting_tokens", lambda held, *_: {"cpu": fits[held["cpu"]]})
    stacker, call, model = _recorded(package, tmp_path)
    assert stacker._sized(StepSizes((8,) * 8, 8), call, model).offloaded is level


def test_a_step_of_other_sizes_is_decided_anew(package: Callable[[str], Path], tmp_path: Path) -> None:
    asked: list[StepSizes] = []

    class Watched(Stacker):
        def _sized(self, sizes: StepSizes, *args: Any) -> Any:
            asked.append(sizes)
            return super()._sized(sizes, *args)

    class Watching(StackingTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.stacker = Watched(self, "on", chunk_tokens=40)

    lengths = (5, 5, 5, 5, 30, 9, 30, 9)
    settings: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "train_sampling_strategy": "sequential",
    }
    trained(package("qwen3_moe"), tmp_path, "on", lengths=lengths, trainer=Watching, **settings)
    assert asked == [StepSizes((5, 5), 5), StepSizes((30, 9), 30)]


def test_a_decision_starts_no_process_and_counts_micro_batches_that_are_not_divided_whole(
    package: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step of other sizes decides. Eight rows of eight tokens could be columns: they are one call."""
    stacker, call, model = _recorded(package, tmp_path)
    at_once: list[int] = []

    def counted(_: ModelCall, chunk_tokens: int, *args: Any) -> dict[str, int]:
        at_once.append(chunk_tokens)
        return {"cpu": 0}

    monkeypatch.setattr(stacking, "working_bytes", counted)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process"))
    stacker._chunk_tokens = 16
    for tokens in (64, 72):
        stacker._sized(StepSizes((tokens,), 8), call, model)
    assert at_once == [64, 16]


def test_experts_of_a_gpu_are_passed_by_single_micro_batches_where_memory_is_scarce(
    package: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, as on the CPU, everything that backward needs would stay on the GPU."""
    stacker, call, model = _recorded(package, tmp_path)
    monkeypatch.setattr(stacking, "fitting_tokens", lambda *_: {"cpu": 5})
    with pytest.raises(CannotStack, match="holds 5 tokens"):
        stacker._sized(StepSizes((8,) * 8, 8), call, model)
    monkeypatch.setattr(stacking, "_multiplied_on_a_gpu", lambda model: True)
    found = stacker._sized(StepSizes((8,) * 8, 8), call, model)
    assert (found.on, found.tokens) == (True, 8)

"""Passes that are replayed: the same losses and gradients as layer by layer, and no replay of what has changed."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from stacked_training import StackingTrainer, assert_alike, rows, trained
from torch import Tensor, nn

from ktc.adapters import as_trained
from ktc.diagnostics import KtcError
from ktc.model.manifest.stale_change_guard import StaleChangeGuard
from ktc.training import KTrainer
from ktc.training.trainers import fetch_ahead, pass_graphs, skipped_update
from ktc.training.trainers.layer_calls import ModelCall
from ktc.training.trainers.layer_pass import through_layers
from ktc.training.trainers.pass_graphs import PassGraphs
from ktc.training.trainers.phases import ExpertsHooks
from ktc.training.trainers.private_api import has_hooks
from ktc.training.trainers.split_layer import LayerCall, SplitLayer
from ktc.training.trainers.stacking import Stacker, StackMode

pytestmark = pytest.mark.usefixtures("one_thread")
EQUAL = (12,) * 16  # lengths of rows: every pass has the same shapes
STEPS: dict[str, Any] = {"gradient_accumulation_steps": 4, "max_steps": 7, "optim": "adamw_torch_fused"}


class Recorded:
    """Code that is run again at each replay, as a CUDA graph runs its kernels."""

    def __init__(self, replay: Callable[[], None]) -> None:
        self.replay = replay


class Repeated(pass_graphs._Graphs):
    """Graphs without a GPU: they write to the same memory each time, forward to that of gradients too."""

    def _record(self, run: Any) -> None:
        outs = run(self._inputs.chunks)
        self._grads = [torch.empty_like(out) for out in outs]
        torch.autograd.backward(outs, self._grads, retain_graph=False)
        self._outs = [out.detach() for out in outs]
        self._of_parameters = [parameter.grad for parameter in self._parameters]
        self._run, self._made = run, list[Tensor]()
        self._forward, self._backward = Recorded(self._again), Recorded(self._back)

    def _again(self) -> None:
        with torch.enable_grad():
            self._made = self._run(self._inputs.chunks)
        for memory in self._of_parameters:  # the memory of both graphs is one pool
            if memory is not None:
                memory.zero_()
        for into, out in zip(self._outs, self._made, strict=True):
            into.copy_(out.detach())

    def _back(self) -> None:
        targets = [*(x for x in self._hidden if x.requires_grad), *self._parameters]
        before = [parameter.grad for parameter in self._parameters]
        into = [*(x.grad for x in self._hidden if x.requires_grad), *self._of_parameters]
        for target in targets:
            target.grad = None
        torch.autograd.backward(self._made, self._grads)
        for target, memory in zip(targets, into, strict=True):
            if memory is not None and target.grad is not None:
                memory.copy_(target.grad)
        for hidden, memory in zip((x for x in self._hidden if x.requires_grad), into, strict=False):
            hidden.grad = memory
        for parameter, grad in zip(self._parameters, before, strict=True):
            parameter.grad = grad


class Replaying(Stacker):
    """A stacker that replays on the CPU too."""

    def _through_layers(self, chunks: Sequence[ModelCall]) -> list[Tensor]:
        assert self.decision is not None
        return self._graphs.through(self._layers, chunks, functools.partial(through_layers, self._layers))

    @property
    def graphs(self) -> PassGraphs:
        return self._graphs


class WithGraphs(StackingTrainer):
    def __init__(self, *args: Any, mode: StackMode, **kwargs: Any) -> None:
        super().__init__(*args, mode=mode, **kwargs)
        self.stacker = Replaying(self, mode, chunk_tokens=40)


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record and replay on the CPU."""

    def captured(layers: Any, inputs: Any, run: Any) -> Repeated:
        graphs = Repeated(inputs, pass_graphs._trained(layers))
        with pass_graphs._without_gradients(graphs._parameters):
            graphs._record(run)
        return graphs

    monkeypatch.setattr(pass_graphs._Graphs, "captured", captured)
    monkeypatch.setattr(pass_graphs, "reason_against", lambda *_: "")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)


def both(out: Path, folder: Path, **settings: Any) -> Replaying:
    ours, theirs = (trained(out, folder, "on", trainer=kind, **settings) for kind in (WithGraphs, StackingTrainer))
    assert_alike(ours, theirs, 1e-6)
    assert isinstance(ours.stacker, Replaying)
    return ours.stacker


def test_replayed_passes_have_the_losses_and_gradients_of_others(
    package: Callable[[str], Path], tmp_path: Path
) -> None:
    stacker = both(package("qwen3_moe"), tmp_path, gradient_accumulation_steps=4, max_steps=6, lengths=EQUAL)
    assert stacker.decision is not None
    assert "layers are replayed as CUDA graphs" in str(stacker.decision)


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A device that computes by itself: whether each step is read and logged in the next one."""
    monkeypatch.setattr(skipped_update, "_DEVICES", {"cpu"})
    monkeypatch.setattr(fetch_ahead, "_KNOWN", {*fetch_ahead._KNOWN, "stacked_training", __name__.partition(".")[0]})
    later: list[bool] = []
    logs_later = KTrainer.logs_later.fget
    assert logs_later is not None
    monkeypatch.setattr(KTrainer, "logs_later", property(lambda self: later.append(logs_later(self)) or later[-1]))
    return later


def test_steps_that_are_replayed_are_read_and_logged_in_the_next_one(
    package: Callable[[str], Path], tmp_path: Path, ahead: list[bool]
) -> None:
    both(package("qwen3_moe"), tmp_path, lengths=EQUAL * 2, **STEPS)
    ours = ahead[: len(ahead) // 2]
    assert not any(ours[:2]) and any(ours) and not ours[-1], "not before the capture, nor at the end"
    assert not any(ahead[len(ours) :]), "layers are not replayed"


def test_a_gradient_that_is_not_finite_is_found_in_memory_that_the_next_replay_overwrites(
    package: Callable[[str], Path], tmp_path: Path, ahead: list[bool]
) -> None:
    class Spoilt(WithGraphs):
        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            _, parameter = next(pair for pair in self.model.named_parameters() if "lora_B" in pair[0])

            def spoil(gradient: Tensor) -> None:
                if self.state.global_step == 4:
                    gradient[0, 0] = float("nan")

            parameter.register_hook(spoil)
            return super().create_optimizer(*args, **kwargs)

    with pytest.raises(KtcError, match=r"step 5: the gradient of `.*lora_B.*` is NaN"):
        trained(package("qwen3_moe"), tmp_path, "on", trainer=Spoilt, lengths=EQUAL * 2, **STEPS)
    assert ahead[-1], "the next step had begun"


def test_passes_of_other_shapes_are_not_replayed(package: Callable[[str], Path], tmp_path: Path) -> None:
    stacker = both(package("qwen3_moe"), tmp_path, gradient_accumulation_steps=2, max_steps=4, lengths=(5, 6, 7, 8) * 2)
    assert stacker.decision is not None
    assert "CUDA graphs" not in str(stacker.decision)


def call(hidden: Tensor, *others: Any, count: int = 2) -> ModelCall:
    layer = LayerCall(None, others, {"positions": others}, ())
    return ModelCall(hidden, (hidden.device,) * count, (layer,) * count)


def test_inputs_are_told_apart_by_layout_values_and_what_is_shared() -> None:
    x, mask, table = torch.zeros(2, 3, 4), torch.zeros(3, 3), torch.zeros(1, 3).expand(2, 3)
    alike = [call(x, mask, 1, None), call(x.clone(), mask.clone(), 1, None)]
    others = [
        call(x, mask, 1.0, None), call(x, mask, 2, None), call(x, mask.t(), 1, None), call(x, mask.bool(), 1, None),
        call(x[:1], mask, 1, None), call(x, mask, 1, mask.clone()), call(x, mask, 1, mask), call(x, None, 1, None),
        call(x.clone().requires_grad_(), mask, 1, None), call(x, table, 1, None),
    ]  # fmt: skip
    signatures = [pass_graphs._Inputs.of([each]).signature for each in (*alike, *others)]
    assert signatures[0] in signatures[1:]
    assert all(signatures.count(signature) == 1 for signature in signatures[2:])


def test_copies_have_the_layout_and_the_values_of_other_inputs() -> None:
    x = torch.randn(2, 3, 4, requires_grad=True)
    tables = torch.randn(1, 3).expand(2, 3), torch.randn(3, 5).t()
    inputs = pass_graphs._Inputs.of([call(x, *tables), call(x.detach().clone(), *tables)])
    copies = inputs.copied()
    assert len(copies.tensors) == len(inputs.tensors) == 4
    assert pass_graphs._Inputs.of(copies.chunks).signature == inputs.signature
    assert not {tensor.data_ptr() for tensor in copies.tensors} & {tensor.data_ptr() for tensor in inputs.tensors}
    more = (tables[0][:1] + 1).expand(2, 3), (tables[1].t() + 1).t()
    copies.take(pass_graphs._Inputs.of([call((x + 1).detach().requires_grad_(), *more), call(x.detach() + 2, *more)]))
    assert torch.equal(copies.chunks[1].hidden, x + 2)
    assert torch.equal(copies.chunks[0].layers[0].kwargs["positions"][0], tables[0] + 1)


def stepping(monkeypatch: pytest.MonkeyPatch, layer: nn.Module) -> Callable[[Tensor], PassGraphs]:
    """Return a function that runs a pass of one layer, whose graphs are always the same."""
    graphs, split = PassGraphs(), SplitLayer(layer, None, None)
    monkeypatch.setattr(pass_graphs._Graphs, "captured", lambda *_: Fixed())

    def step(hidden: Tensor) -> PassGraphs:
        graphs.through([split], [call(hidden, count=1)], lambda chunks: [layer(chunk.hidden) for chunk in chunks])
        return graphs

    return step


class Fixed:
    """Graphs that count their replays and return nothing."""

    replays = 0

    def replayed(self, inputs: Any) -> list[Tensor]:
        self.replays += 1
        return []


def changes() -> dict[str, Callable[[nn.Linear, nn.Dropout, Any], object]]:
    return {
        "weights of another address": lambda linear, *_: setattr(linear, "weight", nn.Parameter(torch.ones(4, 4))),
        "a frozen weight": lambda linear, *_: linear.weight.requires_grad_(False),
        "another mode": lambda linear, dropout, tuned: dropout.eval(),
        "another dropout": lambda linear, dropout, tuned: setattr(dropout, "p", 0.5),
        "another scale": lambda linear, dropout, tuned: tuned.set_scale("default", 3.0),
        "a hook": lambda linear, *_: linear.register_forward_hook(lambda *_: None),
        "no adapter": lambda linear, dropout, tuned: tuned.enable_adapters(False),
    }


@pytest.mark.parametrize("change", changes())
def test_layers_that_changed_are_not_replayed(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    linear, dropout = nn.Linear(4, 4), nn.Dropout(0.0)
    tuned = get_peft_model(nn.Sequential(nn.Linear(4, 4)), LoraConfig(target_modules=["0"]))
    step = stepping(monkeypatch, nn.Sequential(linear, dropout, tuned))
    told = [step(torch.zeros(1, 2, 4)).told for _ in range(4)]
    assert [bool(text) for text in told] == [False, False, True, True]
    adapted = next(module for module in tuned.modules() if isinstance(module, BaseTunerLayer))
    changes()[change](linear, dropout, adapted)
    assert [bool(step(torch.zeros(1, 2, 4)).told) for _ in range(4)] == [False, False, True, True]


def test_a_discarded_replay_keeps_no_memory_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, linear = PassGraphs(), nn.Linear(4, 4)
    made: list[weakref.ref[Kept]] = []
    alive: list[bool] = []

    class Kept(Fixed):
        def replayed(self, inputs: Any) -> list[Any]:
            self.replays += 1
            return [self]

    def captured(*_: Any) -> Kept:
        kept = Kept()
        made.append(weakref.ref(kept))
        return kept

    def run(chunks: Sequence[ModelCall]) -> list[Tensor]:
        alive.extend(kept() is not None for kept in made)
        return [linear(chunk.hidden) for chunk in chunks]

    monkeypatch.setattr(pass_graphs._Graphs, "captured", captured)
    for change in (False, False, False, True):
        if change:
            linear.weight = nn.Parameter(torch.ones(4, 4))
        graphs.through([SplitLayer(linear, None, None)], [call(torch.zeros(1, 2, 4), count=1)], run)
    assert alive == [False]


def test_captures_that_were_not_worth_it_end(monkeypatch: pytest.MonkeyPatch) -> None:
    step, wasted = stepping(monkeypatch, nn.Linear(4, 4)), pass_graphs._WASTED
    told = [step(torch.zeros(1, size, 4)).told for size in range(1, 8) for _ in range(4)]
    replayed, ended = "layers are replayed as CUDA graphs", f"{pass_graphs._NOT}: passes changed too often"
    assert told == ["", "", replayed, replayed] * wasted + [ended] * 4 * (7 - wasted)
    step(torch.zeros(1, 1, 4)).begin_run()
    assert [step(torch.zeros(1, 1, 4)).told for _ in range(3)] == ["", "", replayed]


def test_a_new_run_may_capture_what_an_earlier_one_could_not(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Dropout(0.5)
    step = stepping(monkeypatch, layer)
    assert "random" in [step(torch.zeros(1, 2, 4)).told for _ in range(3)][-1]
    layer.p = 0.0
    step(torch.zeros(1, 2, 4)).begin_run()
    assert "are replayed" in [step(torch.zeros(1, 2, 4)).told for _ in range(3)][-1]


@pytest.mark.parametrize("timed", [True, False])
def test_captures_that_an_evaluation_or_timing_ends_are_no_waste(
    monkeypatch: pytest.MonkeyPatch, *, timed: bool
) -> None:
    step = stepping(monkeypatch, nn.Linear(4, 4))
    for _ in range(2 * pass_graphs._WASTED):
        told = [step(torch.zeros(1, 2, 4)).told for _ in range(4)]
        assert told[3] == "layers are replayed as CUDA graphs"
        if timed:
            with monkeypatch.context() as patch:
                patch.setattr(pass_graphs, "is_timed", lambda: True)
                assert step(torch.zeros(1, 2, 4)).told == ""
        else:
            step(torch.zeros(1, 2, 4)).drop()


def test_layers_that_draw_random_numbers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    step = stepping(monkeypatch, nn.Dropout(0.5))
    told = [step(torch.zeros(1, 2, 4)).told for _ in range(4)]
    assert told[2:] == ["layers are not replayed as CUDA graphs: they draw random numbers"] * 2


def test_a_failed_capture_is_told_and_the_pass_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    step = stepping(monkeypatch, nn.Linear(4, 4))
    monkeypatch.setattr(pass_graphs._Graphs, "captured", fails)
    told = [step(torch.zeros(1, 2, 4)).told for _ in range(4)]
    reason = "the capture failed: operation not permitted when stream is capturing"
    assert told[3] == f"layers are not replayed as CUDA graphs: {reason}"
    assert len(caplog.records) == 1


class Invalidated:
    """A capture whose end raises an error of its own after another one."""

    def __init__(self, graph: Any, **_: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: object) -> None:
        if raised[0] is not None:
            raise RuntimeError("operation failed due to a previous error during capture")


def test_the_first_error_of_a_capture_is_told_and_the_capture_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []
    device, pool = torch.device("cuda:0"), (0, 7)
    monkeypatch.setattr(torch.cuda, "graph", Invalidated)
    monkeypatch.setattr(pass_graphs, "end_failed_capture", lambda *given: ended.append(given))

    def fails(*_: Any) -> None:
        with pass_graphs._capturing(cast("Any", None), device, pool):
            pass
        assert not ended
        with pass_graphs._capturing(cast("Any", None), device, pool):
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    step = stepping(monkeypatch, nn.Linear(4, 4))
    monkeypatch.setattr(pass_graphs._Graphs, "captured", fails)
    told = [step(torch.zeros(1, 2, 4)).told for _ in range(3)][-1]
    assert told.endswith("the capture failed: operation not permitted when stream is capturing")
    assert ended == [(device, pool)]


class Evaluating(WithGraphs):
    """Notes whether there are graphs in each step, and in an evaluation of its own."""

    made: Evaluating
    fails_at = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, eval_dataset=kwargs["train_dataset"], **kwargs)
        type(self).made, self.steps, self.evaluations = self, list[bool](), list[bool]()

    @property
    def has_graphs(self) -> bool:
        assert isinstance(self.stacker, Replaying)
        return self.stacker.graphs._graphs is not None

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            self.steps.append(self.has_graphs)
            if len(self.steps) == self.fails_at:
                raise KeyboardInterrupt
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self.evaluations.append(self.has_graphs)
        return {"eval_loss": 0.0}


@pytest.mark.parametrize("when", [{"eval_strategy": "steps", "eval_steps": 4}, {"eval_strategy": "epoch"}])
def test_graphs_are_dropped_before_an_evaluation(
    package: Callable[[str], Path], tmp_path: Path, when: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {"gradient_accumulation_steps": 4, "max_steps": 5, "lengths": EQUAL, **when}
    run = trained(package("qwen3_moe"), tmp_path, "on", trainer=Evaluating, **settings)
    assert isinstance(run, Evaluating)
    assert run.steps[3]
    assert run.evaluations[:1] == [False]
    assert not run.has_graphs, "after training too"


def test_graphs_are_dropped_where_a_run_fails_and_where_it_is_asked_to_predict(
    package: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Evaluating, "fails_at", 4)
    with pytest.raises(KeyboardInterrupt):
        trained(
            package("qwen3_moe"), tmp_path, "on", trainer=Evaluating, gradient_accumulation_steps=4, max_steps=5,
            lengths=EQUAL,
        )  # fmt: skip
    run = Evaluating.made
    assert run.steps[3]
    assert isinstance(run.stacker, Replaying)
    run.stacker.graphs._refused, run.stacker.graphs._wasted = "another run", 9
    run.stacker.on_train_begin()
    assert (run.stacker.graphs._refused, run.stacker.graphs._wasted) == ("", 0)
    assert not run.has_graphs
    run.stacker.graphs._graphs = cast("Any", Fixed())
    run.predict(rows((5,)))
    assert not run.has_graphs


def test_layers_that_no_graph_holds_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    gpu, layer = torch.device("cuda:0"), nn.Linear(4, 4)
    inputs = pass_graphs._Inputs.of([call(torch.zeros(1, 2, 4), torch.zeros(2))])

    def reason(device: torch.device, *tensors: Any) -> str:
        chunks = tuple(replace(chunk, devices=(device,)) for chunk in inputs.chunks)
        given = pass_graphs._Inputs(chunks, tensors, None)
        return pass_graphs.reason_against([SplitLayer(layer, None, None)], given)

    assert reason(torch.device("cpu")) == "they are on several devices"
    assert reason(gpu, torch.zeros(2)) == "some of their arguments are on another device"
    assert reason(gpu) == "some of their adapters are on another device"
    layer = layer.requires_grad_(False)
    assert reason(gpu) == "nothing in them trains"
    inputs = pass_graphs._Inputs.of([call(torch.zeros(1, 2, 4).requires_grad_())])
    assert reason(gpu) == ""


@pytest.mark.parametrize(
    "register",
    ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
     "register_full_backward_pre_hook"],
)  # fmt: skip
def test_hooks_of_others_inside_layers_are_a_reason(monkeypatch: pytest.MonkeyPatch, register: str) -> None:
    monkeypatch.undo()
    layer = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.Sequential(nn.ReLU()))
    on_gpu = replace(call(torch.zeros(1, 2, 4).requires_grad_()), devices=(torch.device("cuda:0"),))
    given = pass_graphs._Inputs((on_gpu,), (), None)
    monkeypatch.setattr(pass_graphs, "_trained", lambda layers: [])
    split = SplitLayer(layer, None, None)
    experts = ExpertsHooks()
    layer[1].register_forward_pre_hook(experts.before)
    layer[1].register_forward_hook(experts.after)
    layer[0].register_forward_pre_hook(StaleChangeGuard((), ""))
    assert pass_graphs.reason_against([split], given) == ""
    handle = getattr(layer[1][0], register)(lambda *_: None)
    assert pass_graphs.reason_against([split], given) == "some of their modules have hooks"
    handle.remove()
    assert pass_graphs.reason_against([split], given) == ""


def test_adapters_under_autocast_are_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    layer = nn.Sequential(nn.Linear(4, 4))
    attached = cast("Any", get_peft_model(layer, LoraConfig(target_modules=["0"], use_dora=True)))
    monkeypatch.setattr(type(attached), "dtype", torch.bfloat16, raising=False)
    as_trained.cast_as_trained(attached, "LORA")
    assert layer[0]._forward_pre_hooks
    assert layer[0]._forward_hooks
    assert not any(pass_graphs._hooks_inside([SplitLayer(layer, None, None)]))


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_seen(hook: str) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    assert not has_hooks(parameter)
    getattr(parameter, hook)(lambda grad: None)
    assert has_hooks(parameter)

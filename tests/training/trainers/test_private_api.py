"""Each private name that training uses exists in the installed release, and means what we take it for.

`make versions` runs this with the oldest and the newest supported releases.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from transformers import PreTrainedModel, Qwen3MoeConfig, Trainer, TrainingArguments, masking_utils
from transformers.modeling_layers import GradientCheckpointingLayer

from ktc.training.trainers import private_api
from ktc.training.trainers.private_api import TrainerHooks

pytestmark = pytest.mark.usefixtures("one_thread")


class Scripted(nn.Module):
    """A model whose losses are given, whatever its input is."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.losses = iter(losses)

    def forward(self, x: Tensor, **_: Any) -> dict[str, Tensor]:
        return {"loss": self.weight * 0 + next(self.losses)}


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        str(folder), report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, max_grad_norm=0.0,
        per_device_train_batch_size=1, remove_unused_columns=False, **options,
    )  # fmt: skip


def trainer(made: type[Trainer], folder: Path, losses: list[float], **options: Any) -> Trainer:
    data = [{"x": torch.zeros(1)}] * len(losses)
    return made(Scripted(losses), arguments(folder, max_steps=len(losses), **options), train_dataset=data)


# torch: many tensors --------------------------------------------------------------------------------------------------
def test_many_tensors_are_copied() -> None:
    targets = [torch.zeros(2), torch.zeros(3, 1)]
    private_api.copy_all(targets, [torch.ones(2), torch.full((3, 1), 2.0)])
    assert [target.sum().item() for target in targets] == [2, 6]


# transformers: masks --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("masked", [True, False])
def test_masks_that_no_layer_reads_are_not_made(monkeypatch: pytest.MonkeyPatch, *, masked: bool) -> None:
    config = Qwen3MoeConfig(num_hidden_layers=1)
    config._attn_implementation = "sdpa"
    given: dict[str, Any] = {
        "inputs_embeds": torch.zeros(2, 3, 4), "attention_mask": torch.ones(2, 3) if masked else None,
        "position_ids": torch.arange(3)[None], "past_key_values": None,
    }  # fmt: skip
    asked: list[None] = []
    stock = torch.Tensor.all
    monkeypatch.setattr(torch.Tensor, "all", lambda *args: asked.append(None) or stock(*args))
    masking_utils.create_causal_mask(config, **given)
    assert asked or masked, "the host waits for an answer"
    asked.clear()
    with private_api.without_masks():
        made = masking_utils.create_causal_mask(config, **given)
    assert not asked
    assert made.ndim == 4


# torch: captures ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("captures", [True, False])
def test_the_allocator_is_told_that_a_capture_failed(monkeypatch: pytest.MonkeyPatch, *, captures: bool) -> None:
    called: list[tuple[str, int, tuple[int, int]]] = []

    def end(device: int, pool: tuple[int, int]) -> None:
        if not captures:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        called.append(("end", device, pool))

    assert hasattr(torch._C, "_cuda_endAllocateToPool")
    assert hasattr(torch._C, "_cuda_releasePool")
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *given: called.append(("release", *given)))
    generator = torch.Generator().manual_seed(3)
    states: list[Any] = []
    observed = SimpleNamespace(clone_state=generator.clone_state, graphsafe_set_state=states.append)
    monkeypatch.setattr(torch.cuda, "default_generators", (None, observed))
    private_api.end_failed_capture(torch.device("cuda:1"), (0, 4))
    assert called == ([("end", 1, (0, 4)), ("release", 1, (0, 4))] if captures else [])
    assert [state.initial_seed() for state in states] == [3]


def test_an_allocator_without_those_functions_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool")
    monkeypatch.setattr(torch.cuda, "default_generators", ())
    private_api.end_failed_capture(torch.device("cuda:0"), (0, 4))


# torch ----------------------------------------------------------------------------------------------------------------
def test_a_refusal_of_the_compiler_has_one_base_class() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def broken(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x

    with pytest.raises(private_api.CompilerError):
        broken(torch.ones(2))


def test_code_compiled_where_sizes_coincide_serves_other_sizes() -> None:
    torch.compiler.reset()
    counter, matrix = CompileCounter(), nn.Parameter(torch.ones(4, 4))

    @torch.compile(dynamic=True, fullgraph=True, backend=counter)
    def code(x: Tensor, y: Tensor) -> Tensor:
        return (x @ matrix).sum() + y.sum()

    for rows, others in ((4, 4), (3, 5), (6, 6)):
        x, y = torch.ones(rows, 4), torch.ones(others)
        private_api.with_fixed_width(x)
        with private_api.sizes_of_their_own():
            code(x, y)
    assert counter.frame_count == 1


def test_reductions_of_a_group_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        calls: list[int] = []
        group = type(dist.group.WORLD)
        stock = group.allreduce_coalesced
        monkeypatch.setattr(
            group,
            "allreduce_coalesced",
            lambda own, values, *given: calls.append(len(values)) or stock(own, values, *given),
        )
        values = [torch.ones(2), torch.ones(3)]
        with private_api.in_one_call(None):
            for value in values:
                dist.all_reduce(value)
        assert calls == [2] and values[1].tolist() == [1.0] * 3
        with pytest.raises(ValueError, match="between"), private_api.in_one_call(None):
            dist.all_reduce(values[0])
            raise ValueError("between")
        assert dist.all_reduce(values[0], async_op=True).wait(), "it is sent, not noted"
    finally:
        dist.destroy_process_group()


def test_the_store_of_the_run_is_the_one_that_all_processes_opened() -> None:
    given = dist.HashStore()
    dist.init_process_group("gloo", store=given, rank=0, world_size=1)
    try:
        before = given.num_keys()
        private_api.store_of_the_run("some").set("key", "value")
        assert private_api.store_of_the_run("some").get("key") == b"value"
        assert not private_api.store_of_the_run("other").check(["key"])
        assert given.num_keys() == before + 1
    finally:
        dist.destroy_process_group()


def test_containers_are_taken_apart_and_put_together() -> None:
    leaves, spec = private_api.pytree.tree_flatten((1, {"a": [2, None]}))
    assert leaves == private_api.pytree.tree_leaves((1, {"a": [2, None]}))
    assert private_api.pytree.tree_unflatten(leaves, spec) == (1, {"a": [2, None]})


# transformers ---------------------------------------------------------------------------------------------------------
def test_several_gpus_count_as_one(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    assert args.n_gpu <= 1
    args._n_gpu = 2
    assert (args.n_gpu, args.train_batch_size) == (2, 2)
    private_api.use_as_one_device(args)
    assert (args.n_gpu, args.train_batch_size) == (1, 1)


class Foretelling(Trainer):
    """Says before each micro-batch's loss is added what the running loss will be."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.foretold: list[float] = []
        self.found: list[float] = []
        self.prepared = 0

    def _prepare_inputs(self, inputs: Any) -> Any:
        self.prepared += 1
        return super()._prepare_inputs(inputs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.found.append(float(self._tr_loss))
        self.foretold.append(float(self._tr_loss + private_api.sum_as_logged(self, [loss])))
        return loss


@pytest.mark.parametrize("filtered", [True, False])
def test_the_running_loss_is_foretold(tmp_path: Path, filtered: bool) -> None:
    losses = [1.0, math.nan, 3.0, math.inf, 2.0, 5.0] if filtered else [1.0, 4.0, 3.0, 6.0, 2.0, 5.0]
    run = trainer(Foretelling, tmp_path, losses, logging_steps=10, logging_nan_inf_filter=filtered)
    run.train()
    assert run.found == [0.0, *run.foretold[:-1]]
    assert run.state.log_history[-1]["train_loss"] == pytest.approx(run.foretold[-1] / len(losses))
    assert run.prepared == len(losses), "a step prepares its inputs once"


def test_a_sum_of_losses_is_that_of_the_calls_one_by_one(tmp_path: Path) -> None:
    run = trainer(Trainer, tmp_path, [1.0])
    assert float(private_api.sum_as_logged(run, [torch.tensor(2.0), torch.tensor(3.0)])) == 5.0, "before `train`"
    run._tr_loss, run._globalstep_last_logged, run.state.global_step = torch.tensor(4.0), 2, 3
    assert float(private_api.sum_as_logged(run, [torch.tensor(2.0), torch.tensor(math.nan)])) == 2 + (4 + 2) / 2


def test_inputs_are_prepared_as_a_step_does(tmp_path: Path) -> None:
    run = trainer(Trainer, tmp_path, [1.0])
    found = private_api.prepared_inputs(run, {"x": torch.ones(1), "label": "text"})
    assert (found["x"].device, found["label"]) == (run.args.device, "text")
    assert not private_api.prepares_inputs_itself(run)
    assert private_api.prepares_inputs_itself(trainer(Foretelling, tmp_path, [1.0]))


def test_the_stock_trainer_moves_a_model_where_the_hooks_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[torch.device] = []

    def moving(self: Trainer, model: nn.Module, device: torch.device) -> None:
        moved.append(device)

    monkeypatch.setattr(Trainer, "_move_model_to_device", moving)
    trainer(Trainer, tmp_path, [1.0])
    assert moved == [torch.device("cpu")]
    trainer(type("Hooked", (TrainerHooks, Trainer), {}), tmp_path, [1.0])
    assert len(moved) == 1


def test_a_prepared_model_has_an_optimizer_and_no_step(tmp_path: Path) -> None:
    class Hooked(TrainerHooks, Trainer):
        seen: tuple[bool, int, int] | None = None

        def on_model_prepared(self) -> None:
            assert self.seen is None, "once per run"
            self.seen = self.optimizer is not None, self.state.global_step, int(self.state.is_world_process_zero)

    run = trainer(Hooked, tmp_path, [1.0, 2.0])
    run.train()
    assert run.seen == (True, 0, 1)


def test_a_model_takes_another_loss_function() -> None:
    assert PreTrainedModel.loss_function.fset is not None


def test_a_layer_says_whether_it_is_checkpointed() -> None:
    assert GradientCheckpointingLayer.gradient_checkpointing is False


# accelerate -----------------------------------------------------------------------------------------------------------
def test_an_accelerator_kept_in_place_neither_moves_nor_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 2)
    assert {"device_placement", "evaluation_mode"} <= inspect.signature(accelerator.prepare_model).parameters.keys()
    model.hf_device_map = {"a": "cuda:0", "b": "cuda:1"}
    assert accelerator.verify_device_map(model), "what it refuses in several processes"
    given = dict[str, Any]()
    monkeypatch.setattr(Accelerator, "prepare_model", lambda _, model, **named: given.update(named) or model)
    private_api.keep_in_place(accelerator)
    assert not accelerator.verify_device_map(model)
    assert accelerator.prepare_model(model, device_placement=True) is model
    assert given == {"device_placement": False, "evaluation_mode": True}


def test_accelerates_autocasting_is_told_from_other_forwards() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert not private_api.wraps_forward_in_autocast(model)
    accelerator = Accelerator(cpu=True)
    accelerator.native_amp = True  # as with `bf16`, which the process chooses once
    assert private_api.wraps_forward_in_autocast(accelerator.prepare_model(model, evaluation_mode=True))
    assert private_api.wraps_forward_in_autocast(accelerator.prepare_model(model, evaluation_mode=True)), "twice"
    prepared = model.forward
    model.forward = functools.wraps(prepared)(lambda x: prepared(x))  # type: ignore[method-assign]
    assert not private_api.wraps_forward_in_autocast(model), "replaced later"
    other.forward = lambda x: x  # type: ignore[method-assign]
    assert not private_api.wraps_forward_in_autocast(accelerator.prepare_model(other, evaluation_mode=True))
    assert private_api.child_modules(nn.Sequential(model)) == {"0": model}


def test_the_gradients_of_what_trains_are_clipped(tmp_path: Path) -> None:
    class Clipping(TrainerHooks, Trainer):
        trained: tuple[nn.Parameter, ...] = ()

        def trained_parameters(self) -> tuple[nn.Parameter, ...]:
            return self.trained

    run = trainer(Clipping, tmp_path, [1.0])
    run.args.max_grad_norm = 1.0
    run.model.weight.grad, other = torch.tensor(3.0), nn.Parameter(torch.ones(()))
    assert float(run._clip_grad_norm(run.model)) == 3.0
    other.grad = torch.tensor(2.0)
    run.trained = (other,)
    assert float(run._clip_grad_norm(run.model)) == 2.0
    assert float(other.grad) == pytest.approx(1.0)


def test_fetching_and_backward_are_observed(tmp_path: Path) -> None:
    entered = Counter[str]()

    @contextmanager
    def around(name: str) -> Iterator[None]:
        yield
        entered[name] += 1

    batches: list[Any] = []
    run = trainer(Trainer, tmp_path, [1.0] * 4, gradient_accumulation_steps=1)
    private_api.observe_steps(run, lambda: around("fetch"), batches.append, lambda: around("backward"))
    run.train()
    assert entered == {"fetch": 4, "backward": 4}
    assert [len(each) for each in batches] == [1, 1, 1, 1]

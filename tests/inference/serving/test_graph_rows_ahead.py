"""What engines do ahead of requests (steps are captured, prompts are read), and prompts that give way to answers.

Without a GPU, what a graph would replay is computed again at the same addresses.
"""

from __future__ import annotations

import copy
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_answers import FAMILIES, PROMPTS, Served, config_of
from graph_row_engines import (
    by_itself,
    counted_steps,
    failing,
    hooked,
    settled,
    with_graphs,
)
from torch import Tensor
from transformers import PreTrainedModel

from ktc.inference.serving import graph_rows, model_runner, row_memory, worker
from ktc.inference.serving.batch import RowBatch
from ktc.inference.serving.model_runner import ModelRunner
from ktc.inference.serving.request import Limits
from ktc.inference.serving.server import default_chunk
from ktc.inference.serving.warm_prompts import read_warm_prompts
from ktc.model.attention.decode import MOST_TOKENS
from ktc.model.experts.backends.resident_backend import GpuResident

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> PreTrainedModel:
    return with_graphs(request.param)


@pytest.fixture(scope="module")
def model() -> Any:
    return with_graphs("qwen3_moe")


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return counted_steps(monkeypatch)


@pytest.mark.parametrize("adapter", ["", "other"])
def test_a_prompt_gives_way_between_its_layers(model: Any, monkeypatch: pytest.MonkeyPatch, adapter: str) -> None:
    config, logits, step = config_of(model), ModelRunner.logits, RowBatch.step
    inside, long = [False], tuple(range(3, 90))
    within = list[int]()
    has_begun = threading.Event()

    def read(runner: ModelRunner, ids: Tensor, *more: Any) -> Tensor:
        inside[0] = ids.shape[1] > 20
        try:
            return logits(runner, ids, *more)
        finally:
            inside[0] = False

    def counted(batch: RowBatch) -> Tensor:
        within.extend([1] if inside[0] else [])
        return step(batch)

    monkeypatch.setattr(worker, "_OLD_STEP", 0.0)
    monkeypatch.setattr(ModelRunner, "logits", read)
    monkeypatch.setattr(RowBatch, "step", counted)
    with Served(model, Limits()) as served:
        served.engine.capture("")
        served.answers.on_event = lambda _: has_begun.set()
        served.ask("running", PROMPTS[0], 60, config)
        assert has_begun.wait(60)
        served.ask("long", long, 4, config, adapter=adapter)
        assert served.answers.wait("long")[0] == by_itself(model, long, config, 4)
        assert served.answers.wait("running")[0] == by_itself(model, PROMPTS[0], config, 60)
    assert len(within) == model.config.num_hidden_layers


def test_steps_are_captured_before_the_first_request(
    family: PreTrainedModel, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(family)
    with Served(family, Limits(batch=5)) as served:
        served.engine.capture("")
        assert len(steps) == 4
        monkeypatch.setattr(graph_rows, "record_step", None)
        for at, prompt in enumerate(PROMPTS[:5]):
            served.ask(str(at), prompt, 9, config)
        found = [served.answers.wait(str(at))[0] for at in range(5)]
    assert found == [by_itself(family, prompt, config, 9) for prompt in PROMPTS[:5]]


def test_prompts_of_every_kind_are_read_before_the_first_request(
    family: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, config = ModelRunner.logits, config_of(family)
    found = set[tuple[object, ...]]()

    def read(runner: ModelRunner, ids: Tensor, cache: Any, mask: Any, positions: Any) -> Tensor:
        rows, new = ids.shape
        is_few = (new > 1) + (new > MOST_TOKENS)
        found.add((rows > 1, is_few, mask is not None, cache.get_seq_length() > 0))
        return logits(runner, ids, cache, mask, positions)

    chance, before = random.Random(5), set[tuple[object, ...]]()
    with Served(family, Limits(batch=6, prefill_chunk=64, prefix_bytes=1 << 24)) as served:
        monkeypatch.setattr(ModelRunner, "logits", read)
        served.engine.capture("")
        before, found = found, set()
        for turn in range(3):  # the second time, beginnings are cached
            prompts = [tuple(range(3, 3 + (29 * (at + 1) * (at + 1)) % 50)) for at in range(6)]
            for at, prompt in enumerate(prompts):
                served.ask(f"{turn} {at}", (*prompt, chance.randrange(90)), 3, config)
            for at in range(6):
                served.answers.wait(f"{turn} {at}")
    assert len(found) > 3
    assert found <= before


class Experts(torch.nn.Module):
    """Experts of prompts that a GPU computes."""

    def backend(self, *_: object, **__: object) -> GpuResident:
        return object.__new__(GpuResident)


def test_chunks_are_longer_where_a_gpu_reads_prompts_that_give_way(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktc.model.experts.module.FusedMoe", Experts)
    assert default_chunk(model) == 512, "no experts are known"
    fast = copy.deepcopy(model)
    fast.experts = Experts()
    assert default_chunk(fast) == 2048
    monkeypatch.setattr(model_runner, "finds_positions", lambda _: True)
    assert default_chunk(fast) == 512, "requests take turns"
    monkeypatch.undo()
    monkeypatch.setattr("ktc.model.experts.module.FusedMoe", Experts)
    hooked(fast)
    assert default_chunk(fast) == 512, "no step is captured"
    fast.decode_graphs = None
    assert default_chunk(fast) == 512


def test_errors_before_the_first_request_and_after_new_weights_are_told_and_end_nothing(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read = list[str]()

    def reading(*_: Any) -> None:
        read.append("prompts")
        raise ValueError("no kernel")

    config = config_of(model)
    monkeypatch.setattr(worker, "read_warm_prompts", reading)
    with Served(model, Limits(batch=2)) as served:
        served.engine.capture("")
        monkeypatch.setattr(RowBatch, "capture", failing)
        served.engine.change(served.engine.forget, idle=True)
        monkeypatch.undo()
        served.ask("0", PROMPTS[0], 5, config)
        assert served.answers.wait("0")[0] == by_itself(model, PROMPTS[0], config, 5)
    assert read == ["prompts"], "new weights have the kernels of the old ones"
    assert "could not be read: ValueError: no kernel" in caplog.text
    assert "could not be captured, and its memory is released" in caplog.text


def test_warm_prompts_end_in_time(model: Any) -> None:
    assert not read_warm_prompts(ModelRunner(model), "", 64, seconds=0)


def test_steps_are_captured_again_in_idle_time_and_after_new_weights(
    model: Any, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    record, config, busy = graph_rows.record_step, config_of(model), list[bool]()
    monkeypatch.setattr(row_memory, "_LONG", 0)
    with Served(model, Limits(batch=4)) as served:
        engine = served.engine

        def recorded(*given: Any) -> Any:
            busy.append(engine.num_running > 0)
            return record(*given)

        engine.capture("")
        monkeypatch.setattr(graph_rows, "record_step", recorded)
        engine.change(engine.forget, idle=True)
        assert busy == [False] * 3  # 1, 2 and 4 slots
        served.ask("outgrows", [3, 5, 8] * 90, 20, config)
        served.answers.wait("outgrows")
        settled(engine)
        assert len(busy) > 3
        del busy[:]
        for at, prompt in enumerate(PROMPTS[:4]):
            served.ask(str(at), prompt, 9, config)
        found = [served.answers.wait(str(at))[0] for at in range(4)]
    assert found == [by_itself(model, prompt, config, 9) for prompt in PROMPTS[:4]]
    assert not busy


def test_no_answer_waits_for_a_prompt_that_the_gpu_computes_later(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host enqueues all layers at once. Each takes the GPU 60 ms, and a step is behind what is enqueued."""
    config = config_of(model)
    clock, done, stepped = [0.0], [0.0], list[float]()
    logits, step = ModelRunner.logits, RowBatch.step

    def mark(_: object) -> Callable[[], None]:
        done[0] = max(done[0], clock[0]) + 0.06
        end = done[0]
        return lambda: clock.__setitem__(0, max(clock[0], end))

    def stepping(batch: RowBatch) -> Tensor:
        clock[0] = max(clock[0], done[0]) + 0.003
        stepped.append(clock[0])
        return step(batch)

    def read(runner: ModelRunner, *given: Any) -> Tensor:
        for _ in range(5):  # a model of more layers
            logits(runner, given[0], copy.deepcopy(given[1]), *given[2:])
        return logits(runner, *given)

    monkeypatch.setattr(model_runner, "mark", mark)
    monkeypatch.setattr(worker.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(RowBatch, "step", stepping)
    has_begun = threading.Event()
    with Served(model, Limits()) as served:
        served.engine.capture("")
        monkeypatch.setattr(ModelRunner, "logits", read)
        served.answers.on_event = lambda _: has_begun.set()
        served.ask("running", PROMPTS[0], 90, config)
        assert has_begun.wait(60)
        served.ask("long", tuple(range(3, 90)), 4, config)
        served.answers.wait("long")
        served.answers.wait("running")
    assert clock[0] > 0.06 * 6 * model.config.num_hidden_layers
    assert max(after - before for before, after in itertools.pairwise(stepped)) <= 0.2


def test_passes_leave_out_attention_that_makes_a_plan_for_each_length(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, before = ModelRunner.logits, torch.backends.cuda.cudnn_sdp_enabled()
    found = list[bool]()

    def read(runner: ModelRunner, *given: Any) -> Tensor:
        found.append(torch.backends.cuda.cudnn_sdp_enabled())
        return logits(runner, *given)

    with Served(model, Limits()) as served:
        monkeypatch.setattr(ModelRunner, "logits", read)
        served.ask("0", PROMPTS[0], 3, config_of(model))
        served.answers.wait("0")
    assert found and not any(found)
    assert torch.backends.cuda.cudnn_sdp_enabled() == before

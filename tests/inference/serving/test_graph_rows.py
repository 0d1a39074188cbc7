"""Running batches whose steps are captured: every request is answered as alone, whoever joins, leaves or has no memory.

Without a GPU, what a graph would replay is computed again at the same addresses.
"""

from __future__ import annotations

import copy
import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from decoding_models import stock_model
from engine_answers import Answers, alone, config_of
from recorded_steps import eager_graphs
from torch import Tensor
from transformers import PreTrainedModel

from ktc.inference.serving import generation, graph_rows, model_runner, row_memory, worker
from ktc.inference.serving.batch import RowBatch
from ktc.inference.serving.engine import Engine
from ktc.inference.serving.graph_rows import GraphRows
from ktc.inference.serving.model_runner import ModelRunner
from ktc.inference.serving.request import Event, Limits, Request
from ktc.inference.serving.row_memory import RowMemory
from ktc.inference.serving.server import default_chunk
from ktc.inference.serving.warm_prompts import read_warm_prompts
from ktc.model.attention.decode import MOST_TOKENS
from ktc.model.attention.decoding import decoding
from ktc.model.attention.sparse import Sparse
from ktc.model.attention.sparsity import Sparsity
from ktc.model.decode_steps.cuda_graph import DecodeGraphs, StepRecorder
from ktc.model.experts.resident_backend import GpuResident

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
PROMPTS = [(5, 9, 33), tuple(range(20, 43)), (7,), (50, 4, 4, 61, 8, 90, 12), (5, 9, 34), tuple(range(30, 41))]
# Full attention; latent; sliding windows of 16 tokens and sinks.
FAMILIES = ("qwen3_moe", "deepseek_v2", "gpt_oss")


def graphs_here() -> DecodeGraphs:
    return DecodeGraphs() if DEVICE != "cpu" else eager_graphs()


def with_graphs(name: str) -> Any:
    model: Any = stock_model(name, torch.float32).to(DEVICE)
    if DEVICE != "cpu":
        model.set_experts_implementation("batched_mm")
    model.decode_graphs = graphs_here()
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> PreTrainedModel:
    return with_graphs(request.param)


@pytest.fixture(scope="module")
def model() -> Any:
    return with_graphs("qwen3_moe")


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The slots of each captured step that is replayed; 0 for a step that is refused."""
    found, begin = list[int](), GraphRows.begin

    def counted(graphs: GraphRows, memory: RowMemory, *given: Any) -> Any:
        begun = begin(graphs, memory, *given)
        found.append(0 if begun is None else memory.slots_of_step)
        return begun

    monkeypatch.setattr(GraphRows, "begin", counted)
    return found


class Served:
    """An engine, and what it answers."""

    def __init__(self, model: Any, limits: Limits) -> None:
        self.answers = Answers()
        self.engine = Engine(ModelRunner(model), limits, self.answers)

    def __enter__(self) -> Served:
        self.engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()

    def ask(self, name: str, prompt: Sequence[int], num_tokens: int, config: Any, **more: Any) -> None:
        self.engine.submit(Request(name, tuple(prompt), num_tokens, config, **more))


def by_itself(model: Any, prompt: Sequence[int], config: Any, count: int) -> list[int]:
    with torch.device(DEVICE):
        return alone(model, prompt, config, count)


@pytest.mark.parametrize("limits", [Limits(), Limits(batch=3, prefill_chunk=8)], ids=["together", "three in chunks"])
def test_a_busy_batch_gives_the_tokens_of_each_alone(
    family: PreTrainedModel, limits: Limits, steps: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    config, counts = config_of(family), [24, 16, 12, 1, 7, 26]
    with Served(family, limits) as served:
        for at, (prompt, count) in enumerate(zip(PROMPTS, counts, strict=True)):
            served.ask(str(at), prompt, count, config)
        found = [served.answers.wait(str(at))[0] for at in range(len(PROMPTS))]
    assert found == [
        by_itself(family, *both, count) for *both, count in zip(PROMPTS, [config] * 6, counts, strict=True)
    ]
    assert steps and 0 not in steps and "L451" not in caplog.text
    assert max(steps) == (8 if limits.batch > 3 else 4)


def test_rows_join_and_leave_without_another_capture(
    model: Any, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    record, captured = graph_rows.record_step, list[bool]()

    def counted(*given: Any) -> Any:
        captured.append(given[3] is model.decode_graphs.recorder)
        return record(*given)

    monkeypatch.setattr(graph_rows, "record_step", counted)
    config = config_of(model)
    with Served(model, Limits(batch=4)) as served:
        later = iter(range(1, 12))

        def ask_next(event: Event) -> None:
            if event.name == "0" and (at := next(later, None)) is not None:
                served.ask(str(at), PROMPTS[at % 6], 3 + at % 4, config)

        served.answers.on_event = ask_next
        served.ask("0", PROMPTS[0], 40, config)
        found = [served.answers.wait(str(at))[0] for at in range(12)]
        served.ask("after", PROMPTS[1], 5, config)
        assert served.answers.wait("after")[0] == by_itself(model, PROMPTS[1], config, 5)
    assert found[0] == by_itself(model, PROMPTS[0], config, 40)
    assert found[1:] == [by_itself(model, PROMPTS[at % 6], config, 3 + at % 4) for at in range(1, 12)]
    assert {1, 2, 4} <= set(steps)
    assert sorted(captured) == [False] * 3 + [True] * 3 and not captured[0]  # a capture follows an eager step


def test_a_longer_prompt_and_a_long_answer_outgrow_the_memory(
    family: PreTrainedModel, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_memory, "_LONG", 256)
    config, chance = config_of(family), random.Random(2)
    prompts = [tuple(chance.randrange(3, 90) for _ in range(length)) for length in (9, 200, 300, 40)]
    with Served(family, Limits(prefill_chunk=128)) as served:
        for at, prompt in enumerate(prompts):
            served.ask(str(at), prompt, 12 if at else 70, config)
        found = [served.answers.wait(str(at))[0] for at in range(4)]
        [batch] = served.engine._worker.batches.values()
        assert isinstance(batch, RowBatch) and isinstance(batch._rows, RowMemory)
        assert batch._rows.capacity == 512
    assert found == [by_itself(family, prompt, config, 12 if at else 70) for at, prompt in enumerate(prompts)]
    assert 0 not in steps


@pytest.mark.parametrize("rows", [1, 2])
def test_a_step_without_memory_is_taken_again_with_fewer_rows(
    family: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    finish, failed, config = RowBatch.finish, list[int](), config_of(family)

    def failing(batch: RowBatch) -> None:
        finish(batch)
        if len(batch.running) > rows:
            failed.append(len(batch.running))
            raise MemoryError("cannot allocate 8,589,934,592 bytes")

    monkeypatch.setattr(RowBatch, "finish", failing)
    with Served(family, Limits(batch=8)) as served:
        for at, prompt in enumerate(PROMPTS):
            served.ask(str(at), prompt, 9, config)
        found = [served.answers.wait(str(at))[0] for at in range(len(PROMPTS))]
    assert found == [by_itself(family, prompt, config, 9) for prompt in PROMPTS]
    assert failed and min(failed) == rows + 1


def test_a_capture_without_memory_is_tried_once_and_leaves_those_of_fewer_rows(model: Any) -> None:
    lacking = list[int]()

    def record(compute: Any, device: torch.device, changing: Sequence[Tensor], context: Any) -> Any:
        if changing[0].shape[0] > 2:
            lacking.append(changing[0].shape[0])
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB")
        return model.decode_graphs.recorder.record(compute, device, changing, context)

    smaller, config = copy.copy(model), config_of(model)
    smaller.decode_graphs = DecodeGraphs(StepRecorder(record, torch.device(DEVICE).type, None))
    with Served(smaller, Limits(batch=8)) as served:
        served.engine.capture("")
        [batch] = served.engine._worker.batches.values()
        for at, prompt in enumerate(PROMPTS):
            served.ask(str(at), prompt, 9, config)
        found = [served.answers.wait(str(at))[0] for at in range(len(PROMPTS))]
        settled(served.engine)
        assert isinstance(batch, RowBatch) and batch._graphs is not None
        assert {1, 2} <= {slots for slots, step in batch._graphs._steps.items() if step.is_captured}
    assert found == [by_itself(model, prompt, config, 9) for prompt in PROMPTS]
    assert lacking == [4]


def test_a_seeded_token_of_a_step_that_failed_is_drawn_again(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(model, temperature=1.3)
    config.do_sample = True
    finish, count = RowBatch.finish, [0]

    def failing(batch: RowBatch) -> None:
        finish(batch)
        count[0] += 1
        if len(batch.running) == 2 and count[0] > 4:
            raise MemoryError("cannot allocate 8,589,934,592 bytes")

    torch.manual_seed(11)
    wanted = by_itself(model, PROMPTS[1], config, 9)
    monkeypatch.setattr(RowBatch, "finish", failing)
    with Served(model, Limits()) as served:
        served.ask("beside", PROMPTS[0], 9, config, seed=3)
        served.ask("drawn", PROMPTS[1], 9, config, seed=11)
        assert served.answers.wait("drawn")[0] == wanted
        assert len(served.answers.wait("beside")[0]) == 9


def test_a_replay_is_waited_for_where_a_choice_fails(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a GPU would call the host functions of a step whose memory is released."""
    log, draws, draw = list[str](), [0], generation.draw

    def record(*given: Any) -> Any:
        output, replay = model.decode_graphs.recorder.record(*given)

        def logged() -> Callable[[], None]:
            done = replay()
            log.append("begun")
            return lambda: (done(), log.append("waited"))[1]

        return output, logged

    def failing(*given: Any) -> Tensor:
        draws[0] += 1
        if draws[0] == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB")
        return draw(*given)

    logged, config = copy.copy(model), config_of(model, temperature=1.3)
    config.do_sample = True
    logged.decode_graphs = DecodeGraphs(StepRecorder(record, torch.device(DEVICE).type, None))
    monkeypatch.setattr(generation, "draw", failing)
    with Served(logged, Limits()) as served:
        served.ask("0", PROMPTS[0], 9, config, seed=1)
        served.answers.wait("0")
    assert log == ["begun", "waited"] * (len(log) // 2)


def test_more_rows_than_a_graph_takes_are_computed_on_the_same_memory(
    family: PreTrainedModel, caplog: pytest.LogCaptureFixture, steps: list[int]
) -> None:
    recorder = graphs_here().recorder

    def record(compute: Any, device: torch.device, changing: Sequence[Tensor], context: Any) -> Any:
        if changing[0].shape[0] > 2:
            raise RuntimeError("it waits for the GPU")
        return recorder.record(compute, device, changing, context)

    other, config = copy.copy(family), config_of(family)
    cast_graphs: Any = other
    cast_graphs.decode_graphs = DecodeGraphs(StepRecorder(record, torch.device(DEVICE).type, None))
    with Served(other, Limits(batch=8)) as served:
        for at, prompt in enumerate(PROMPTS):
            served.ask(str(at), prompt, 9, config)
        found = [served.answers.wait(str(at))[0] for at in range(len(PROMPTS))]
        served.engine.change(lambda: served.engine._worker.capture(""), idle=True)
        served.ask("beside", PROMPTS[1], 30, config)
        for at, prompt in enumerate(PROMPTS):
            served.ask(f"again {at}", prompt, 9, config)
        found += [served.answers.wait(f"again {at}")[0] for at in range(len(PROMPTS))]
    assert found == [by_itself(family, prompt, config, 9) for prompt in PROMPTS] * 2
    assert "it waits for the GPU (in running batches of 4)" in caplog.text


def test_prompts_over_cached_beginnings_have_the_same_answers(family: PreTrainedModel) -> None:
    config, answers = config_of(family), list[list[int]]()
    beginning = tuple(range(40, 64))
    with Served(family, Limits(prefix_bytes=1 << 22)) as served:
        served.ask("beside", PROMPTS[0], 60, config)
        for at, prompt in enumerate([beginning, (*beginning, 5, 6), (*beginning, 9), (*beginning, 5, 6, 7)]):
            served.ask(str(at), prompt, 9, config)
            answers.append(served.answers.wait(str(at))[0])
            assert answers[-1] == by_itself(family, prompt, config, 9)
        longer = (*beginning, 5, 6, 7, *answers[-1])
        before = served.engine.num_cached_tokens
        served.ask("longer", longer, 9, config)
        assert served.answers.wait("longer")[0] == by_itself(family, longer, config, 9)
        assert served.engine.num_cached_tokens - before >= len(longer) - 1
        assert served.answers.wait("beside")[0] == by_itself(family, PROMPTS[0], config, 60)


def test_draws_follow_the_seed_whoever_runs_beside(model: Any) -> None:
    drawn = config_of(model, temperature=1.3, top_p=0.9, top_k=40)
    penalised = config_of(model, temperature=1.3, repetition_penalty=1.2)
    drawn.do_sample = penalised.do_sample = True
    wanted = list[list[int]]()
    for config in (drawn, penalised):
        torch.manual_seed(11)
        wanted.append(by_itself(model, PROMPTS[1], config, 12))
    with Served(model, Limits()) as served:
        for at, prompt in enumerate(PROMPTS):
            served.ask(f"beside {at}", prompt, 5 + at, (config_of(model), drawn, penalised)[at % 3], seed=at)
        served.ask("drawn", PROMPTS[1], 12, drawn, seed=11)
        served.ask("penalised", PROMPTS[1], 12, penalised, seed=11)
        assert [served.answers.wait(name)[0] for name in ("drawn", "penalised")] == wanted


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


def settled(engine: Engine) -> None:
    """Wait until the engine has no steps to capture."""
    for _ in range(600):
        if not engine.lacks_steps:
            return
        time.sleep(0.05)
    raise AssertionError("steps are captured without end")


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


def failing(*_: Any) -> Any:
    raise ValueError("no luck")


def sparse(model: Any) -> None:
    for layer in model.model.layers:
        decoding(layer.self_attn, None, Sparse(Sparsity(4, 2, 4, "int4", shared=False), None))


def hooked(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda *_: None)


def refused(model: Any) -> None:
    model.decode_graphs = DecodeGraphs(StepRecorder(failing, "cpu", None))


@pytest.mark.parametrize(
    ("spoil", "reason"), [(sparse, "do not split"), (hooked, "has a forward hook"), (refused, "no luck")]
)
def test_what_cannot_be_captured_is_eager_and_told_once(
    spoil: Callable[[Any], None], reason: str, model: Any, caplog: pytest.LogCaptureFixture, steps: list[int]
) -> None:
    spoiled = copy.deepcopy(model)
    spoil(spoiled)
    config = config_of(spoiled)
    with Served(spoiled, Limits()) as served:
        for turn in range(2):
            for at, prompt in enumerate(PROMPTS[:3]):
                served.ask(f"{turn} {at}", prompt, 8, config)
            found = [served.answers.wait(f"{turn} {at}")[0] for at in range(3)]
            assert found == [by_itself(spoiled, prompt, config, 8) for prompt in PROMPTS[:3]]
    assert steps[-1] == 0 and len(steps) <= 2  # what a capture alone refuses has taken an eager step
    told = [record.getMessage() for record in caplog.records if "L451" in record.getMessage()]
    assert len(told) == 1 and reason in told[0] and "in running batches" in told[0]

"""Running batches whose steps are captured: every request is answered as alone, whoever joins, leaves or has no memory.

Without a GPU, what a graph would replay is computed again at the same addresses.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from engine_answers import FAMILIES, PROMPTS, Served, config_of
from graph_row_engines import (
    DEVICE,
    by_itself,
    counted_steps,
    failing,
    graphs_here,
    hooked,
    settled,
    with_graphs,
)
from torch import Tensor
from transformers import PreTrainedModel

from ktc.inference.serving import generation, graph_rows, row_memory
from ktc.inference.serving.batch import RowBatch
from ktc.inference.serving.request import Event, Limits
from ktc.inference.serving.row_memory import RowMemory
from ktc.model.attention.decoding import decoding
from ktc.model.attention.sparse import Sparse
from ktc.model.attention.sparsity import Sparsity
from ktc.model.decode_steps.cuda_graph import DecodeGraphs, StepRecorder

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

    def record(compute: Any, device: torch.device, changing: Sequence[Tensor], *given: Any) -> Any:
        if changing[0].shape[0] > 2:
            lacking.append(changing[0].shape[0])
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB")
        return model.decode_graphs.recorder.record(compute, device, changing, *given)

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
    assert log.count("begun") == log.count("waited")


def test_more_rows_than_a_graph_takes_are_computed_on_the_same_memory(
    family: PreTrainedModel, caplog: pytest.LogCaptureFixture, steps: list[int]
) -> None:
    recorder = graphs_here().recorder

    def record(compute: Any, device: torch.device, changing: Sequence[Tensor], *given: Any) -> Any:
        if changing[0].shape[0] > 2:
            raise RuntimeError("it waits for the GPU")
        return recorder.record(compute, device, changing, *given)

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


def sparse(model: Any) -> None:
    for layer in model.model.layers:
        decoding(layer.self_attn, None, Sparse(Sparsity(4, 2, 4, "int4", shared=False), None))


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

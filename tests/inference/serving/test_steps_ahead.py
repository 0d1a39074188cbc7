"""Running batches whose next step begins before the host has a token: answers, order of work, ends, and errors.

Without a GPU, what a graph would replay is computed again at the same addresses.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_answers import FAMILIES, PROMPTS, Served, config_of
from graph_row_engines import DEVICE, by_itself, graphs_here, with_graphs
from recorded_steps import LastMoment, call_at_once
from torch import Tensor

from ktc.inference.serving import generation, row_memory
from ktc.inference.serving.batch import RowBatch
from ktc.inference.serving.engine import Engine
from ktc.inference.serving.graph_rows import GraphRows
from ktc.inference.serving.model_runner import ModelRunner
from ktc.inference.serving.request import Event, Limits, Request
from ktc.inference.serving.worker import Worker
from ktc.model.decode_steps.cuda_graph import DecodeGraphs, StepRecorder
from ktc.model.decode_steps.device_feed import feed
from ktc.model.experts.host.host_node import HostNodes
from ktc.model.kernels.sent_values import SentValues

pytestmark = pytest.mark.usefixtures("one_thread")


class Steps:
    """Records steps, and logs their begins and waits, and the passes of prompts."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch, *, ahead: bool, launch: Any) -> None:
        self.log: list[str] = []
        self.fails: set[int] = set()  # numbers of the waits that raise
        self.model = copy.copy(model)
        recorder = StepRecorder(self._record, torch.device(DEVICE).type, launch, LastMoment, ahead=ahead)
        self.model.decode_graphs = DecodeGraphs(recorder)
        logits = ModelRunner.logits

        def read(runner: ModelRunner, *given: Any) -> Tensor:
            self.log.append("prompt")
            return logits(runner, *given)

        monkeypatch.setattr(ModelRunner, "logits", read)

    def _record(self, *given: Any) -> Any:
        output, replay = graphs_here().recorder.record(*given)

        def begin() -> Any:
            done = replay()
            self.log.append("begin")
            number = self.log.count("begin")

            def wait() -> None:
                done()
                self.log.append("wait")
                if number in self.fails:
                    raise RuntimeError(f"step {number} failed")

            return wait

        return output, begin

    def served(self, **limits: Any) -> Served:
        served = Served(self.model, Limits(**limits))
        served.engine.start()
        served.engine.change(lambda: served.engine._worker._capture_all(""))
        served.engine.change(self.log.clear)
        return served


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Any:
    return with_graphs(request.param)


@pytest.fixture(scope="module")
def model() -> Any:
    return with_graphs("qwen3_moe")


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Serve a model; the engine is stopped at the end."""
    running = list[Engine]()

    def served(model: Any, *, ahead: bool = True, launch: Any = None, **limits: Any) -> tuple[Steps, Served]:
        steps = Steps(model, monkeypatch, ahead=ahead, launch=launch)
        found = steps.served(**limits)
        running.append(found.engine)
        return steps, found

    yield served
    for engine in running:
        engine.stop()


def answers(served: Served, config: Any, count: int = 12, **more: Any) -> list[list[int]]:
    """Answers to all prompts at once."""
    for at, prompt in enumerate(PROMPTS):
        served.ask(str(at), prompt, count, config, **more)
    return [served.answers.wait(str(at))[0] for at in range(len(PROMPTS))]


def ended(tokens: list[int], ends: set[int]) -> list[int]:
    """An answer up to its first end."""
    return next((tokens[: at + 1] for at, token in enumerate(tokens) if token in ends), tokens)


def balanced(log: list[str]) -> bool:
    return log.count("begin") == log.count("wait")


def test_a_step_begins_before_the_token_before_it_is_read(model: Any, serve: Any) -> None:
    steps, served = serve(model)
    config = config_of(model)
    served.answers.on_event = lambda event: steps.log.append("token")
    served.ask("0", PROMPTS[0], 6, config)
    assert served.answers.wait("0")[0] == by_itself(model, PROMPTS[0], config, 6)
    served.engine.stop()
    # A token is emitted when the next step has begun, the last one at once; the limit costs no step.
    assert [one for one in steps.log if one != "token"] == [
        "prompt", "begin", *3 * ["begin", "wait"], "begin", "wait", "wait",
    ]  # fmt: skip
    assert steps.log.count("token") == 6


def test_without_it_the_order_is_step_by_step(model: Any, serve: Any) -> None:
    steps, served = serve(model, ahead=False)
    config = config_of(model)
    served.ask("0", PROMPTS[0], 6, config)
    assert served.answers.wait("0")[0] == by_itself(model, PROMPTS[0], config, 6)
    assert steps.log == ["prompt", *5 * ["begin", "wait"]]


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 1.3, "top_k": 40}, {"temperature": 1.2, "repetition_penalty": 1.2}]
)
def test_rows_that_a_token_ends_leave_the_others_as_they_are(family: Any, serve: Any, settings: dict[str, Any]) -> None:
    config = config_of(family, **settings)
    config.do_sample = bool(settings)
    whole = list[list[int]]()
    for at, prompt in enumerate(PROMPTS):
        torch.manual_seed(at)
        whole.append(by_itself(family, prompt, config, 24))
    ends = {whole[0][5], whole[3][-1], whole[1][len(whole[1]) // 2]}
    steps, served = serve(family)
    config.eos_token_id = sorted(ends)
    for at, prompt in enumerate(PROMPTS):
        served.ask(str(at), prompt, 24, config, seed=at)
    found = [served.answers.wait(str(at)) for at in range(len(PROMPTS))]
    assert [tokens for tokens, _ in found] == [ended(tokens, ends) for tokens in whole]
    assert len({len(tokens) for tokens, _ in found}) > 1
    served.engine.stop()
    assert balanced(steps.log)
    assert any(steps.log[at : at + 2] == ["begin", "begin"] for at in range(len(steps.log)))


def test_stop_texts_end_answers(model: Any, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(model)
    whole = [by_itself(model, prompt, config, 16) for prompt in PROMPTS]

    class Stops:
        def __init__(self, stop: tuple[str, ...], _: Any) -> None:
            self.end = int(stop[0])

        def completes(self, token: int) -> bool:
            return token == self.end

    monkeypatch.setattr(generation, "_StopTexts", Stops)
    _, served = serve(model)
    for at, prompt in enumerate(PROMPTS):
        served.ask(str(at), prompt, 16, config, stop=(str(whole[at][4 + at]),))
    found = [served.answers.wait(str(at))[0] for at in range(len(PROMPTS))]
    assert found == [ended(tokens, {tokens[4 + at]}) for at, tokens in enumerate(whole)]


class EvenTokens:
    """A grammar of which every other token is an even one, and which ends with the ninth."""

    def __init__(self, late: list[int]) -> None:
        self.added, self.late = 0, late

    def start(self) -> EvenTokens:
        return EvenTokens(self.late)

    def masked(self, logits: Tensor) -> Tensor:
        self.late += [self.added] * self.is_complete
        even = torch.arange(logits.shape[-1], device=logits.device) % 2 == 0
        return logits.masked_fill(even if self.added % 2 else ~even, float("-inf"))

    def add(self, token: int) -> None:
        assert token % 2 == self.added % 2
        self.added += 1

    @property
    def is_complete(self) -> bool:
        return self.added == 9


def test_grammars_follow_their_answers(model: Any, serve: Any) -> None:
    found, late = list[list[list[int]]](), list[int]()
    config = config_of(model)
    for ahead in (False, True):
        steps, served = serve(model, ahead=ahead)
        grammar: Any = EvenTokens(late)
        for at, prompt in enumerate(PROMPTS):
            served.ask(str(at), prompt, 12, config, grammar=grammar if at % 2 else None)
        found.append([served.answers.wait(str(at))[0] for at in range(len(PROMPTS))])
        assert ("begin begin" in " ".join(steps.log)) == ahead
    assert found[0] == found[1] and {len(tokens) for tokens in found[0]} == {9, 12}
    assert not late, "rows that have ended are asked for tokens"


def test_the_prefix_cache_has_no_position_of_a_surplus_step(family: Any, serve: Any) -> None:
    config = config_of(family)
    prompt = tuple(range(40, 64))
    end = by_itself(family, prompt, config, 12)[7]
    rows = list[Any]()
    for ahead in (False, True):
        _, served = serve(family, ahead=ahead, prefix_bytes=1 << 22)
        config.eos_token_id = None
        served.ask("beside", PROMPTS[0], 40, config)
        config = copy.deepcopy(config)
        config.eos_token_id = end
        served.ask("0", prompt, 12, config)
        answer = served.answers.wait("0")[0]
        assert answer[-1] == end
        served.answers.wait("beside")
        entries: Any = served.engine.change(lambda served=served: list(served.engine._worker.prefixes._entries))
        rows.append(max(entries, key=lambda entry: prompt == tuple(entry.tokens[:24])))
        before, longer = served.engine.num_cached_tokens, (*prompt, *answer, 9)
        config = config_of(family)
        served.ask("longer", longer, 5, config)
        assert served.answers.wait("longer")[0] == by_itself(family, longer, config, 5)
        assert served.engine.num_cached_tokens - before == len(longer) - 2
    one, other = rows
    assert torch.equal(one.tokens, other.tokens) and one.row.length == other.row.length == len(one.tokens)
    for number in range(len(one.row.layers)):
        for a, b in zip(one.row.layer(number), other.row.layer(number), strict=True):
            assert torch.allclose(a, b, rtol=1e-3, atol=1e-3)  # the rows beside differ


def test_an_error_of_a_surplus_step_is_no_answers(model: Any, serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(model)
    whole = by_itself(model, PROMPTS[0], config, 12)
    config.eos_token_id = whole[5]
    wanted = ended(whole, {whole[5]})
    steps, served = serve(model)
    steps.fails = {len(wanted)}  # the first token is the prompt's
    served.ask("0", PROMPTS[0], 12, config)
    assert served.answers.wait("0") == (wanted, served.answers.wait("0")[1])
    assert served.answers.wait("0")[1].finish == "stop"
    config.eos_token_id = None
    served.ask("1", PROMPTS[1], 9, config)
    assert served.answers.wait("1")[0] == by_itself(model, PROMPTS[1], config, 9)
    assert f"step {len(wanted)} failed" in caplog.text


def test_an_error_of_a_step_ends_the_rows_that_need_it(model: Any, serve: Any) -> None:
    config = config_of(model)
    whole = [by_itself(model, prompt, config, 12) for prompt in PROMPTS[:2]]
    config.eos_token_id = whole[0][5]
    lengths = [len(ended(tokens, {whole[0][5]})) for tokens in whole]
    assert lengths[0] < lengths[1]
    steps, served = serve(model)
    steps.fails = {lengths[0]}
    served.engine.change(lambda: [served.ask(str(at), PROMPTS[at], 12, config) for at in range(2)])
    assert served.answers.wait("0")[0] == whole[0][: lengths[0]]
    tokens, end = served.answers.wait("1")
    assert tokens == whole[1][: lengths[0]] and end.error == f"RuntimeError: step {lengths[0]} failed"
    served.engine.stop()
    assert balanced(steps.log)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.3}])
def test_a_step_ahead_without_memory_is_taken_again(
    model: Any, serve: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    again, calls = GraphRows.again, [0]

    def failing(*given: Any) -> Any:
        calls[0] += 1
        if calls[0] in (3, 9):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB")
        return again(*given)

    config = config_of(model, **settings)
    config.do_sample = bool(settings)
    wanted = list[list[int]]()
    for prompt in PROMPTS:
        torch.manual_seed(4)
        wanted.append(by_itself(model, prompt, config, 12))
    _, served = serve(model)
    monkeypatch.setattr(GraphRows, "again", failing)
    assert answers(served, config, seed=4) == wanted
    assert calls[0] > 9


def test_a_failed_steps_token_is_drawn_again_where_the_next_had_begun(
    model: Any, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, count = RowBatch.finish, [0]

    def failing(batch: RowBatch) -> None:
        finish(batch)
        count[0] += 1
        if count[0] == 4:
            assert batch.is_ahead
            raise MemoryError("cannot allocate 8,589,934,592 bytes")

    config = config_of(model, temperature=1.3)
    config.do_sample = True
    torch.manual_seed(11)
    wanted = by_itself(model, PROMPTS[1], config, 9)
    _, served = serve(model)
    monkeypatch.setattr(RowBatch, "finish", failing)
    served.engine.change(lambda: [served.ask(str(at), PROMPTS[1], 9, config, seed=11) for at in range(2)])
    assert [served.answers.wait(str(at))[0] for at in range(2)] == [wanted] * 2


def test_a_row_without_a_token_feeds_none_to_the_next_step(
    model: Any, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, drawn = config_of(model), config_of(model, temperature=1.3)
    drawn.do_sample = True
    chosen, calls = generation.draw, [0]

    def draw(*given: Any) -> Tensor:
        calls[0] += 1
        return torch.full_like(chosen(*given), -1) if calls[0] == 5 else chosen(*given)

    _, served = serve(model)
    monkeypatch.setattr(generation, "draw", draw)
    served.engine.change(
        lambda: [served.ask(str(at), PROMPTS[at], 12, (config, drawn)[at], seed=1 if at else None) for at in range(2)]
    )
    assert served.answers.wait("0")[0] == by_itself(model, PROMPTS[0], config, 12)
    tokens, end = served.answers.wait("1")
    assert len(tokens) == 4 and "no token can be drawn" in end.error


def test_cancelled_rows_leave_a_step_that_is_under_way(model: Any, serve: Any) -> None:
    config = config_of(model)
    steps, served = serve(model)

    def cancel(event: Event) -> None:  # on the engine's thread, when the next step has begun
        if event.name == "0" and len(served.answers._tokens["0"]) == 4:
            for name in ("0", "2"):
                served.engine.cancel(name)

    served.answers.on_event = cancel
    served.engine.change(lambda: [served.ask(str(at), PROMPTS[at], 16, config) for at in range(3)])
    found = [served.answers.wait(str(at)) for at in range(3)]
    assert found[1][0] == by_itself(model, PROMPTS[1], config, 16)
    assert [end.finish for _, end in found] == ["cancelled", "length", "cancelled"]
    served.ask("alone", PROMPTS[3], 200, config)
    served.answers.on_event = lambda event: served.engine.cancel("alone")
    assert served.answers.wait("alone")[1].finish == "cancelled"
    served.engine.stop()
    assert balanced(steps.log)


def test_a_prompt_waits_for_the_step_under_way_and_no_other(model: Any, serve: Any) -> None:
    config = config_of(model)
    steps, served = serve(model)

    def ask(event: Event) -> None:
        if event.name == "0" and len(served.answers._tokens["0"]) == 6:
            steps.log.append("request")
            served.ask("1", PROMPTS[1], 6, config)

    served.answers.on_event = ask
    served.ask("0", PROMPTS[0], 30, config)
    found = [served.answers.wait(str(at))[0] for at in range(2)]
    assert found == [by_itself(model, PROMPTS[0], config, 30), by_itself(model, PROMPTS[1], config, 6)]
    at = steps.log.index("request")
    until = steps.log.index("prompt", at)
    assert steps.log[at:until].count("begin") == 0 and balanced(steps.log[:until])


def test_prompts_in_chunks_get_their_turns(model: Any, serve: Any) -> None:
    config, long = config_of(model), tuple(range(3, 90))
    steps, served = serve(model, prefill_chunk=8)
    served.engine.change(lambda: [served.ask(str(at), (PROMPTS[0], long)[at], 30, config) for at in range(2)])
    found = [served.answers.wait(str(at))[0] for at in range(2)]
    assert found == [by_itself(model, prompt, config, 30) for prompt in (PROMPTS[0], long)]
    passes = [at for at, one in enumerate(steps.log) if one == "prompt"]
    assert len(passes) > 8
    assert all(steps.log[one:other].count("begin") <= 1 for one, other in itertools.pairwise(passes))


def test_changes_of_the_model_see_no_step_under_way(model: Any, serve: Any) -> None:
    config = config_of(model)
    steps, served = serve(model)
    logs, tokens, has_begun = list[list[str]](), list[int](), threading.Event()
    served.answers.on_event = lambda _: has_begun.set()
    served.ask("0", PROMPTS[0], 60, config)
    assert has_begun.wait(60)

    def change() -> None:
        logs.append(steps.log[:])
        tokens.append(len(served.answers._tokens["0"]))

    for _ in range(6):
        served.engine.change(change)
    assert served.answers.wait("0")[0] == by_itself(model, PROMPTS[0], config, 60)
    assert all(map(balanced, logs)) and tokens[-1] > 0
    assert all(count == 0 or log.count("wait") + 1 == count for log, count in zip(logs, tokens, strict=True))


def test_new_weights_and_forgotten_steps_wait_for_the_answers(model: Any, serve: Any) -> None:
    config = config_of(model)
    steps, served = serve(model)
    served.ask("before", PROMPTS[0], 20, config)
    served.engine.change(served.engine.forget)  # among running rows: graphs are forgotten
    assert served.answers.wait("before")[0] == by_itself(model, PROMPTS[0], config, 20)
    served.engine.change(served.engine.forget, idle=True)
    assert answers(served, config) == [by_itself(model, prompt, config, 12) for prompt in PROMPTS]
    assert balanced(steps.log)


def test_batches_of_two_adapters_take_turns(model: Any, serve: Any) -> None:
    config = config_of(model)
    steps, served = serve(model)
    served.engine.change(
        lambda: [served.ask(str(at), PROMPTS[at], 12, config, adapter=("", "other")[at]) for at in range(2)]
    )
    found = [served.answers.wait(str(at))[0] for at in range(2)]
    assert found == [by_itself(model, PROMPTS[at], config, 12) for at in range(2)]
    served.engine.stop()
    begun = "".join(one[0] for one in steps.log if one != "prompt")
    assert "bb" not in begun and balanced(steps.log)


def test_a_long_answer_moves_its_row_between_steps(family: Any, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_memory, "_LONG", 0)
    config = config_of(family)
    _, served = serve(family)
    for at in range(2):
        served.ask(str(at), PROMPTS[at], 280 + at, config)
    found = [served.answers.wait(str(at))[0] for at in range(2)]
    assert found == [by_itself(family, PROMPTS[at], config, 280 + at) for at in range(2)]


def test_a_fault_of_the_choice_waits_for_all_steps(model: Any, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(model)
    steps, served = serve(model)
    read, calls = SentValues.read, [0]

    def failing(copied: SentValues) -> list[Any]:
        calls[0] += 1
        if calls[0] == 4:
            raise RuntimeError("the GPU is lost")
        return read(copied)

    monkeypatch.setattr(SentValues, "read", failing)
    served.ask("0", PROMPTS[0], 12, config)
    tokens, end = served.answers.wait("0")
    assert tokens == by_itself(model, PROMPTS[0], config, 12)[:3] and end.error == "RuntimeError: the GPU is lost"
    assert balanced(steps.log)
    served.ask("1", PROMPTS[1], 12, config)
    assert served.answers.wait("1")[0] == by_itself(model, PROMPTS[1], config, 12)


def test_events_of_an_end_are_not_kept_for_a_later_step(model: Any, serve: Any) -> None:
    """The row that stays would send them with its next step."""
    config = config_of(model)
    _, served = serve(model)
    order, step = list[str](), Worker._step

    def logged(worker: Worker, adapter: str, **more: Any) -> None:
        step(worker, adapter, **more)
        order.append("step")

    served.engine._worker._step = logged.__get__(served.engine._worker)
    served.answers.on_event = lambda event: order.append(f"end {event.name}") if event.end else None
    served.engine.change(lambda: [served.ask(str(at), PROMPTS[at], 6 + 6 * at, config) for at in range(2)])
    for at in range(2):
        served.answers.wait(str(at))
    served.engine.stop()
    assert order == [*4 * ["step"], "end 0", *6 * ["step"], "end 1", "step"]


def test_copies_are_of_the_values_at_their_time() -> None:
    values = torch.tensor([3, 5], device=DEVICE)
    copied = SentValues(values)
    values.add_(1)
    assert copied.read() == [3, 5]


def test_further_rows_of_a_step_repeat_the_first() -> None:
    inputs = {"input_ids": torch.zeros((4, 1), dtype=torch.int64), "position_ids": torch.tensor([[7], [3], [7], [7]])}
    feed(inputs, torch.tensor([9, 8]))
    assert inputs["input_ids"][:, 0].tolist() == [9, 8, 9, 9]
    assert inputs["position_ids"][:, 0].tolist() == [8, 4, 8, 8]


def test_errors_of_experts_are_asked_for_by_the_number_of_the_step(
    model: Any, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = list[int | None]()
    monkeypatch.setattr(HostNodes, "check", lambda _, name_of, number=None: numbers.append(number))
    steps, served = serve(model, launch=call_at_once)
    del numbers[:]
    served.ask("0", PROMPTS[0], 7, config_of(model))
    served.answers.wait("0")
    served.engine.stop()
    first = numbers[0]
    assert first is not None and numbers == list(range(first, first + 6))
    assert steps.log.count("begin") == 6


def test_the_reason_against_a_capture_is_that_of_its_first_error(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    def failing(*_: Any) -> Any:
        try:
            raise ValueError("it waits for the GPU")
        except ValueError:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")  # noqa: B904

    other = copy.copy(model)
    other.decode_graphs = DecodeGraphs(StepRecorder(failing, torch.device(DEVICE).type, None))
    with Served(other, Limits()) as served:
        served.ask("0", PROMPTS[0], 4, config_of(model))
        served.answers.wait("0")
    assert "it waits for the GPU (in running batches)" in caplog.text


def test_a_request_knows_its_last_token(model: Any) -> None:
    one = generation.Generation(Request("", (3, 4), 2, config_of(model)), model)
    assert not one.is_at_limit
    one.add(5)
    assert one.is_at_limit


def test_waiting_prompts_with_room_are_next(model: Any) -> None:
    has: Callable[..., Any] = lambda of: of.has_prompts  # noqa: E731
    scheduler = Worker(ModelRunner(model), Limits(batch=1), lambda _: None).scheduler
    assert not has(scheduler)
    for name in ("0", "1"):
        scheduler.add(Request(name, (3, 4), 4, config_of(model)))
    assert has(scheduler)
    scheduler.is_draining = True
    assert not has(scheduler)
    scheduler.is_draining = False
    next(scheduler._prefills())
    scheduler.start("0")
    assert not has(scheduler), "there is no room"
    scheduler.finish(["0"])
    assert has(scheduler)

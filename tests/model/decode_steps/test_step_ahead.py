"""`generate` while a step is computed: what it does meanwhile, where it waits, and whose errors it raises."""

from __future__ import annotations

import os
import threading
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from decoding_models import generated
from recorded_steps import call_at_once, eager_graphs, record_eagerly
from torch import Tensor
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer

from ktc.model.decode_steps.cuda_graph import DecodeGraphs, StepRecorder
from ktc.model.decode_steps.step_ahead import PendingStep, StepAhead, WaitingCriteria
from ktc.model.decode_steps.step_memory import length_of


class _Steps:
    """Records steps that are computed when they are waited for, as a slow GPU would, and logs what happens."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fails = 0  # the number of the wait that raises

    def record(self, compute: Any, device: torch.device, *_: Any) -> Any:
        output, replay = record_eagerly(compute, device)

        def begin() -> Any:
            self.log.append("begin")
            replay()

            def wait() -> None:
                self.log.append("wait")
                if self.log.count("wait") == self.fails:
                    raise RuntimeError("experts failed")

            return wait

        return output, begin


class _Choice(LogitsProcessor):
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        self.log.append("choice")
        return scores


_SCORES: dict[str, Any] = {"output_scores": True, "return_dict_in_generate": True}  # stock code's loop alone has them


def test_generate_prepares_a_choice_while_a_step_is_computed(
    compiled_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, steps = generated(compiled_model), _Steps()
    monkeypatch.setattr(compiled_model, "decode_graphs", DecodeGraphs(StepRecorder(steps.record, "cpu", call_at_once)))
    given: dict[str, Any] = {"logits_processor": LogitsProcessorList([_Choice(steps.log)]), **_SCORES}
    assert torch.equal(cast("Any", generated(compiled_model, **given)).sequences, wanted)
    assert steps.log == ["choice"] + 23 * ["begin", "choice", "wait"]
    steps.log.clear()
    streamer, row = Mock(BaseStreamer), 1
    generated(compiled_model, row, streamer=streamer, **given)
    assert steps.log == ["choice"] + 23 * ["begin", "wait", "choice"]


def test_an_error_of_a_step_ends_generate_and_leaves_the_cache_before_it(
    compiled_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = _Steps()
    monkeypatch.setattr(compiled_model, "decode_graphs", DecodeGraphs(StepRecorder(steps.record, "cpu", call_at_once)))
    for fails in (3, 23):
        cache, steps.fails = DynamicCache(config=compiled_model.config), fails
        steps.log.clear()
        with pytest.raises(RuntimeError, match="experts failed"):
            generated(compiled_model, past_key_values=cache, **_SCORES)
        assert steps.log.count("begin") == fails and length_of(cache) == 9 + fails - 1


def test_another_thread_waits_for_a_step_and_its_error_stays_with_the_first() -> None:
    ended: list[int] = []

    def end() -> None:
        ended.append(1)
        raise RuntimeError("experts failed")

    ahead, step = StepAhead(), PendingStep(end)
    criterion = WaitingCriteria(ahead, ())
    ahead.last = step
    step.settle()
    with pytest.raises(RuntimeError, match="experts failed"):
        criterion(torch.ones(2, 3), None)
    assert not bool(criterion(torch.ones(2, 3), None).any())
    assert ended == [1]


class _Reading(StoppingCriteria):
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self.log.append(str(input_ids[0, -1].item()))
        return torch.tensor([False, True])


@pytest.mark.parametrize("others", [0, 1])
def test_stock_criteria_are_enqueued_before_the_wait_and_others_asked_behind_it(
    others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, ahead, stock = list[str](), StepAhead(), (MaxLengthCriteria(3), EosTokenCriteria([7, 8]))
    isin = torch.isin
    monkeypatch.setattr(torch, "isin", lambda *given: (log.append("eos"), isin(*given))[1])
    criteria = WaitingCriteria(ahead, (*stock, *(_Reading(log) for _ in range(others))))
    assert any(hasattr(one, "eos_token_id") for one in criteria) and len(criteria) == 2 + others
    for ids, wanted in (
        ([[1, 7], [2, 3]], [True, False]),
        ([[1, 2], [2, 8]], [False, True]),
        ([[1] * 3] * 2, [True] * 2),
    ):
        log.clear()
        ahead.last = PendingStep(lambda: log.append("wait"))
        done = criteria(torch.tensor(ids), None)
        assert done.tolist() == [one or bool(row and others) for row, one in enumerate(wanted)]
        assert log == ["eos", "wait", *(str(ids[0][-1]) for _ in range(others))]


class _AfterFirst(LogitsProcessor):
    """Fails behind the first step, as code does that finds no numbers."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        self.calls += 1
        if self.calls > 1:
            raise ValueError("no scores")
        return scores


def test_an_error_of_a_step_comes_before_its_consequences(compiled_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = _Steps()
    monkeypatch.setattr(compiled_model, "decode_graphs", DecodeGraphs(StepRecorder(steps.record, "cpu", call_at_once)))
    steps.fails = 1
    with pytest.raises(RuntimeError, match="experts failed") as error:
        generated(compiled_model, logits_processor=LogitsProcessorList([_AfterFirst()]))
    assert isinstance(error.value.__cause__, ValueError)
    steps.fails = 0
    with pytest.raises(ValueError, match="no scores"):
        generated(compiled_model, logits_processor=LogitsProcessorList([_AfterFirst()]))


class _Inner(LogitsProcessor):
    """Generates with the same model while its step is computed."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.model, self.options, self.inner = model, options, False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        if not self.inner:
            self.inner = True
            generated(self.model, 1, **self.options)
            self.inner = False
        return scores


@pytest.mark.parametrize("streamed", [False, True])
def test_generate_within_generate_waits_for_its_own_steps(
    compiled_model: Any, monkeypatch: pytest.MonkeyPatch, *, streamed: bool
) -> None:
    steps = _Steps()
    monkeypatch.setattr(compiled_model, "decode_graphs", DecodeGraphs(StepRecorder(steps.record, "cpu", call_at_once)))
    options = {"streamer": Mock(BaseStreamer)} if streamed else {}
    wanted = generated(compiled_model, max_new_tokens=4)
    inner = _Inner(compiled_model, max_new_tokens=3, **options)
    assert torch.equal(generated(compiled_model, max_new_tokens=4, logits_processor=[inner]), wanted)
    steps.log.clear()
    steps.fails = 3  # the first of the outer `generate`, begun after two of the inner one
    with pytest.raises(RuntimeError, match="experts failed"):
        generated(compiled_model, max_new_tokens=4, logits_processor=[inner])
    assert steps.log.count("wait") == steps.log.count("begin")


def test_a_drawn_token_waits_for_its_step(compiled_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, multinomial = _Steps(), torch.multinomial
    monkeypatch.setattr(compiled_model, "decode_graphs", DecodeGraphs(StepRecorder(steps.record, "cpu", call_at_once)))

    def drawn(*args: Any, **kwargs: Any) -> Tensor:
        steps.log.append("draw")
        return multinomial(*args, **kwargs)

    monkeypatch.setattr(torch, "multinomial", drawn)
    generated(compiled_model, max_new_tokens=4, do_sample=True, **_SCORES)
    assert steps.log == ["draw"] + 3 * ["begin", "wait", "draw"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_does_not_wait_for_a_step_of_its_parent() -> None:
    graphs, begun, go = eager_graphs(), threading.Event(), threading.Event()

    def end() -> None:
        begun.set()
        go.wait(30)

    graphs._last = step = PendingStep(end)
    waiting = threading.Thread(target=step.settle)
    waiting.start()
    assert begun.wait(30)
    child = os.fork()
    if child == 0:
        graphs.clear()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    go.set()
    waiting.join()
    assert status == 0

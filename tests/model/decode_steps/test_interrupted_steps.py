"""Interrupts of a step that a GPU computes: someone waits for it until it is done, and its experts are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from graph_row_engines import with_graphs
from recorded_steps import eager_graphs

from ktc.inference.serving.batch import RowBatch
from ktc.inference.serving.model_runner import ModelRunner
from ktc.model.decode_steps.graph_replay import Wait, with_calls
from ktc.model.decode_steps.step_ahead import PendingStep, StepAhead, waited_for_by
from ktc.model.kernels.step_context import StepContext


class _Interrupt(BaseException):
    """As `KeyboardInterrupt`, which would end pytest where it is not expected."""


class _Nodes:
    """What is expected of a thread."""

    def __init__(self) -> None:
        self.expected = 0

    def begin(self) -> None:
        self.expected += 2

    def dismiss(self) -> None:
        self.expected = 0


class _Waits:
    """A function that raises some errors before it returns."""

    def __init__(self, *errors: type[BaseException]) -> None:
        self.errors, self.ended = [*errors], 0

    def __call__(self) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.ended += 1


def waited(wait: Callable[[], None], nodes: Any) -> Wait:
    return with_calls(lambda: wait, nodes)


def test_an_interrupt_is_raised_when_the_step_is_done() -> None:
    wait, nodes = _Waits(_Interrupt), _Nodes()
    with pytest.raises(_Interrupt):
        waited(wait, nodes)()
    assert wait.ended == 1
    assert nodes.expected == 2, "the thread counts them itself"


def test_a_second_interrupt_leaves_the_step_under_way_and_its_calls_expected() -> None:
    wait, nodes = _Waits(_Interrupt, _Interrupt), _Nodes()
    step = PendingStep(waited(wait, nodes))
    with pytest.raises(_Interrupt):
        step.settle()
    assert wait.ended == 0 and nodes.expected == 2
    step.finish()
    assert wait.ended == 1
    step.finish()
    assert wait.ended == 1


@pytest.mark.parametrize("errors", [(RuntimeError,), (_Interrupt, RuntimeError)])
def test_nothing_is_expected_after_an_error_of_the_gpu(errors: tuple[type[BaseException], ...]) -> None:
    nodes = _Nodes()
    with pytest.raises(RuntimeError):
        waited(_Waits(*errors), nodes)()
    assert nodes.expected == 0


@pytest.mark.parametrize("error", [_Interrupt, RuntimeError, ValueError])
def test_nothing_is_expected_of_a_replay_that_did_not_begin(error: type[BaseException]) -> None:
    nodes = _Nodes()
    with pytest.raises(error):
        with_calls(_Waits(error), nodes)  # type: ignore[arg-type]
    assert nodes.expected == 0
    nodes.begin = _begun_and_interrupted(nodes)  # type: ignore[method-assign]
    with pytest.raises(_Interrupt):
        waited(_Waits(), nodes)
    assert nodes.expected == 0


def test_the_calls_of_the_replay_before_are_answered_first() -> None:
    nodes, before = _Nodes(), list[int]()
    nodes.expected = 2  # of the replay before
    nodes.begin = _begun_and_interrupted(nodes)  # type: ignore[method-assign]
    with pytest.raises(_Interrupt):
        with_calls(_Waits, nodes, lambda: before.append(nodes.expected))  # type: ignore[arg-type]
    assert before == [4] and nodes.expected == 0


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_the_calls_of_the_replay_before_one_that_could_not_be_launched_are_answered(error: type[Exception]) -> None:
    nodes, before = _Nodes(), list[int]()
    nodes.begin()  # for the replay before
    with pytest.raises(error):
        with_calls(_Waits(error), nodes, lambda: before.append(nodes.expected))  # type: ignore[arg-type]
    assert before == [4] and nodes.expected == 0

    def lost() -> None:
        raise ValueError("the GPU is lost")

    with pytest.raises(ValueError, match="lost"):
        with_calls(_Waits(error), nodes, lost)  # type: ignore[arg-type]
    assert nodes.expected == 0


def _begun_and_interrupted(nodes: _Nodes) -> Callable[[], None]:
    def begin() -> None:
        nodes.expected += 2
        raise _Interrupt

    return begin


def test_the_end_of_generate_waits_for_a_step_whose_wait_was_interrupted() -> None:
    ahead, wait = StepAhead(), _Waits(_Interrupt)
    ahead.last = PendingStep(wait)
    with pytest.raises(_Interrupt), waited_for_by(ahead, StepContext()):
        ahead.finish()
    assert wait.ended == 1


def test_a_model_waits_for_a_step_that_interrupts_have_left() -> None:
    graphs, wait = eager_graphs(), _Waits(_Interrupt)
    graphs._last = PendingStep(wait)
    with pytest.raises(_Interrupt):
        graphs.clear()
    graphs.clear()
    assert wait.ended == 1 and graphs._last is None


@pytest.mark.parametrize(("error", "ended"), [(_Interrupt, 1), (MemoryError, 0)])
def test_a_batch_waits_again_after_an_interrupt_alone(error: type[BaseException], ended: int) -> None:
    batch, wait = RowBatch(ModelRunner(with_graphs("qwen3_moe"))), _Waits(error)
    batch._under_way.append(PendingStep(wait))
    with pytest.raises(error):
        batch.finish()
    assert batch.clear() == []
    assert wait.ended == ended

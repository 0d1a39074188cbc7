"""Steps that a GPU computes while `generate` goes on: Python's work between two steps costs no time of its own then.

In: a step that a device has begun. Out: the step is done, and its errors are raised, where `generate` asks its stopping
criteria whether to go on, before it reads a token. The thread sleeps until then: the cores belong to the experts.
What `generate` does before that is enqueued behind the step: the scores, the choice of a token, longer ids.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor
from transformers import StoppingCriteria

Work = Callable[[], None]


class UnderWay:
    """A step that has begun. `end` waits for it and raises its errors; it is called once."""

    def __init__(self, end: Work) -> None:
        self._end: Work | None = end
        self._error: BaseException | None = None
        self._ending = threading.Lock()

    def settle(self) -> None:
        """Wait for the step. Its error is kept for `finish`, since another thread may wait too."""
        with self._ending:
            end, self._end = self._end, None
            if end is not None:
                try:
                    end()
                except BaseException as error:  # noqa: BLE001 - raised by `finish`
                    self._error = error

    def finish(self) -> None:
        """Wait for the step, and raise its error, once."""
        self.settle()
        error, self._error = self._error, None
        if error is not None:
            raise error


class StepAhead(StoppingCriteria):
    """The last step of one `generate`. As a stopping criterion it waits for the step, and stops nothing."""

    def __init__(self) -> None:
        self._last: UnderWay | None = None
        self._on: Tensor | None = None

    def begin(self, step: UnderWay) -> None:
        """Let the step be waited for later."""
        self._last = step

    def finish(self) -> None:
        """Wait for the last step, and raise its error."""
        last, self._last = self._last, None
        if last is not None:
            last.finish()

    def settle(self) -> None:
        """Wait for the last step."""
        last, self._last = self._last, None
        if last is not None:
            last.settle()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Return for each sequence that it goes on, when the last step is done."""
        self.finish()
        if self._on is None or self._on.shape[0] != input_ids.shape[0]:
            self._on = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        return self._on


_CURRENT: Final[ContextVar[StepAhead | None]] = ContextVar("step_ahead", default=None)


def current() -> StepAhead | None:
    """Return what waits for the steps of the `generate` that is under way, None where each step is waited for."""
    return _CURRENT.get()


@contextmanager
def waited_for_by(ahead: StepAhead) -> Generator[None]:
    """Let steps in the context be waited for by `ahead`. The last one is done at the end, after an error too."""
    token = _CURRENT.set(ahead)
    try:
        yield
        ahead.finish()
    finally:
        ahead.settle()
        _CURRENT.reset(token)

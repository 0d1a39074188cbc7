"""Steps that a GPU computes while `generate` continues: Python's work between two steps costs no time of its own then.

In: a step that a device has begun. Out: the step is done, and its errors are raised, where `generate` asks its stopping
criteria whether to continue, before it reads a token. The thread sleeps until then: the cores belong to the experts.
The scores, the choice of a token and longer ids are enqueued behind the step. A token that is drawn at random is chosen
when the step is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria

Work = Callable[[], None]


class UnderWay:
    """A step that has begun. `end` waits for it and raises its errors; it is called once."""

    def __init__(self, end: Work) -> None:
        self._end: Work | None = end
        self._error: Exception | None = None
        self._ending = threading.Lock()

    def settle(self) -> None:
        """Wait for the step. Its error is kept for `finish`, since another thread may wait too."""
        with self._ending:
            end, self._end = self._end, None
            if end is not None:
                try:
                    end()
                except Exception as error:  # noqa: BLE001 - raised by `finish`
                    self._error = error

    def finish(self) -> None:
        """Wait for the step, and raise its error, once."""
        self.settle()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def error_before(self, error: BaseException) -> BaseException:
        """Wait for the step, and return its error or else `error`, which may be one of its consequences."""
        try:
            self.finish()
        except Exception as of_step:  # noqa: BLE001 - the caller raises it
            of_step.__cause__ = error
            return of_step
        return error


class StepAhead:
    """The last step of one `generate`, and the `owner` of the steps that it waits for."""

    def __init__(self, owner: object) -> None:
        self.owner = owner
        self._last: UnderWay | None = None

    def begin(self, step: UnderWay) -> None:
        """Let the step be waited for later. The one before is done: see `finish`."""
        self._last = step

    def finish(self) -> None:
        """Wait for the last step, and raise its error."""
        last, self._last = self._last, None
        if last is not None:
            last.finish()

    def error_before(self, error: BaseException) -> BaseException:
        """See `UnderWay.error_before`."""
        last, self._last = self._last, None
        return error if last is None else last.error_before(error)


class BeforeSampling(LogitsProcessor):
    """Wait for a step when its scores are ready: PyTorch's sampling must not see those of a failed one on a GPU."""

    def __init__(self, ahead: StepAhead) -> None:
        self._ahead = ahead

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        """Return the scores as they are."""
        self._ahead.finish()
        return scores


class BeforeReading(StoppingCriteria):
    """Wait for a step when its token is chosen, and stop nothing."""

    def __init__(self, ahead: StepAhead) -> None:
        self._ahead = ahead
        self._on: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Return False for each sequence."""
        self._ahead.finish()
        if self._on is None or self._on.shape[0] != input_ids.shape[0]:
            self._on = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        return self._on


_CURRENT: Final[ContextVar[StepAhead | None]] = ContextVar("step_ahead", default=None)


def current(owner: object) -> StepAhead | None:
    """Return what waits for the next step of `owner`, when the one before is done. None: the caller waits."""
    ahead = _CURRENT.get()
    if ahead is None or ahead.owner is not owner:
        return None
    ahead.finish()
    return ahead


@contextmanager
def waited_for_by(ahead: StepAhead | None) -> Generator[None]:
    """Let steps in the context be waited for by `ahead`, or by callers. The last one is done at the end.

    Its error comes before one that the context raises.
    """
    token = _CURRENT.set(ahead)
    try:
        yield
        if ahead is not None:
            ahead.finish()
    except BaseException as error:
        if ahead is not None and (first := ahead.error_before(error)) is not error:
            raise first  # noqa: B904 - its cause is set
        raise
    finally:
        _CURRENT.reset(token)

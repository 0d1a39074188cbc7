"""Steps that a GPU computes while `generate` continues, so that Python works between two steps at the same time.

In: a step that a device has begun. Out: the step is done, and its errors are raised, where `generate` asks its stopping
criteria whether to continue, before it reads a token.
A thread that waits sleeps while experts on the CPU need the cores (`record_graph`). Behind the last answer of
`ktc::HostThread`, and through a step without such experts, it spins on one core, as PyTorch's own waits do.
An interrupt of a wait is raised when the step is done; after a second one the next step waits for it.
The scores, the choice of a token, longer ids and stock criteria are enqueued behind the step. A token that is drawn at
random is chosen when the step is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, Final, cast

from torch import Tensor
from transformers import (
    EosTokenCriteria,
    LogitsProcessor,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from ktc.model.kernels.step_context import StepContext

Work = Callable[[], None]


class PendingStep:
    """A step that has begun. `end` waits for it and raises its errors. It is called again only after an interrupt."""

    def __init__(self, end: Work) -> None:
        self._end: Work | None = end
        self._error: Exception | None = None
        self._ending = threading.Lock()

    def settle(self) -> None:
        """Wait for the step. Its error is kept for `finish`, since another thread may wait too."""
        with self._ending:
            if self._end is not None:
                try:
                    self._end()
                except Exception as error:  # noqa: BLE001 - raised by `finish`
                    self._error = error
                self._end = None  # not after an interrupt: the step may be under way

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
    """The last step that one `generate` has begun, in `last`.

    `begun` is the captured step and its inputs, None where the last step was not captured.
    """

    def __init__(self) -> None:
        self.last: PendingStep | None = None
        self.begun: Any = None

    def finish(self) -> None:
        """Wait for the last step, and raise its error."""
        if self.last is not None:
            self.last.finish()  # after an interrupt it stays, and the end of the block waits for it
        self.last = None


class BeforeSampling(LogitsProcessor):
    """Wait for a step when its scores are ready: PyTorch's sampling must not see those of a failed one on a GPU."""

    def __init__(self, ahead: StepAhead) -> None:
        self._ahead = ahead

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        """Return the scores as they are."""
        self._ahead.finish()
        return scores


_ENQUEUED: Final = (MaxLengthCriteria, EosTokenCriteria)  # of stock code, which read no token on the host


class WaitingCriteria(StoppingCriteriaList):
    """Criteria that are asked when a step is done; those of stock code are enqueued behind it before."""

    def __init__(self, ahead: StepAhead, criteria: Iterable[StoppingCriteria]) -> None:
        super().__init__(criteria)
        self._ahead = ahead

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Return whether each sequence ends."""
        criteria: list[Any] = list(cast("Any", self))
        rest = [criterion for criterion in criteria if type(criterion) not in _ENQUEUED]
        done: Any = None
        for criterion in criteria:
            if type(criterion) in _ENQUEUED:
                ends = criterion(input_ids, scores, **kwargs)
                done = ends if done is None else done | ends
        self._ahead.finish()
        if rest or done is None:
            ends = cast("Any", StoppingCriteriaList(rest))(input_ids, scores, **kwargs)
            done = ends if done is None else done | ends
        return done


@contextmanager
def waited_for_by(ahead: StepAhead | None, context: StepContext) -> Generator[None]:
    """Let steps inside the block be waited for by `ahead`, or by callers. The last one is done at the end.

    Its error comes before one that the block raises.
    """
    with context.entered(step_ahead=ahead):
        try:
            yield
            if ahead is not None:
                ahead.finish()
        except BaseException as error:
            last = None if ahead is None else ahead.last
            if last is not None and (first := last.error_before(error)) is not error:
                raise first  # noqa: B904 - its cause is set
            raise

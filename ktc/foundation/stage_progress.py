"""The steps of a stage that takes seconds, reported to a listener while it runs.

In: the steps. Out: a call of the context's listener before each step and after the last one, with the steps done and
those in all. Without a listener nothing happens, and a stage stays a function of its values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Final, TypeVar

Listener = Callable[[int, int], None]
Step = TypeVar("Step")

_LISTENER: Final[ContextVar[Listener | None]] = ContextVar("listener", default=None)


def listening(listener: Listener) -> AbstractContextManager[object]:
    """Return a context that reports all steps inside it to the listener."""
    from ktc.foundation.temporary_values import context_value

    return context_value(_LISTENER, listener)


def tell(done: int, total: int) -> None:
    """Report the number of finished steps and of all steps to the listener."""
    if (listener := _LISTENER.get()) is not None:
        listener(done, total)


def counted(steps: Iterable[Step], total: int) -> Iterator[Step]:
    """Yield the steps of a stage, and report to the listener how many are done."""
    tell(0, total)
    for done, step in enumerate(steps, 1):
        yield step
        tell(done, total)

"""The steps of a stage that takes seconds, reported to a listener while it runs.

In: the steps. Out: a call of the context's listener before each step and after the last one, with the steps done and
those in all. Without a listener nothing happens, and a stage stays a function of its values.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, TypeVar

Listener = Callable[[int, int], None]
Step = TypeVar("Step")

_LISTENER: Final[ContextVar[Listener | None]] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener) -> Generator[None]:
    """Report all steps inside the block to the listener."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def tell(done: int, total: int) -> None:
    """Report to the listener how many steps are done, of how many."""
    if (listener := _LISTENER.get()) is not None:
        listener(done, total)


def counted(steps: Iterable[Step], total: int) -> Iterator[Step]:
    """Yield the steps of a stage, and report to the listener how many are done."""
    tell(0, total)
    for done, step in enumerate(steps, 1):
        yield step
        tell(done, total)

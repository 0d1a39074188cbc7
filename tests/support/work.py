"""How much work something is, counted in calls: unlike seconds, the same number on every machine, however busy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def calls(work: Callable[[], object], most: int | None = None) -> int:
    """The number of functions that `work()` calls, of Python and of C. It is stopped with an error beyond `most`."""
    count = 0

    def counting(_: FrameType, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")
        if most is not None and count > most:
            sys.setprofile(None)
            raise AssertionError(f"more than {most} calls")

    sys.setprofile(counting)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count

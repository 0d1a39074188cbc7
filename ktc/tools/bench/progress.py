"""The progress of a run, as its parts report it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProgressSink:
    """`stage` is the compiler's `observe`, `progress` a part's name with done and total, `finished` a finished part.

    A total of 0 is unknown.
    """

    stage: Callable[[str, object], None]
    progress: Callable[[str, int, int], None]
    finished: Callable[[str], None]

    def part(self, name: str) -> Callable[[int, int], None]:
        """Return the function that takes done and total of a part, which are shown in percent."""
        return lambda done, total: self.progress(name, 100 * done // max(1, total), 100)

    def steps(self, name: str, total: int) -> Callable[[Sequence[float]], None]:
        """Return the function that takes the seconds of the steps so far, of `total` that a part has."""
        self.progress(name, 0, total)

        def finished(seconds: Sequence[float]) -> None:
            self.progress(name, len(seconds), total)
            self.finished(f"{name}: step {len(seconds)} of {total}, {seconds[-1]:.2f} s")

        return finished

    def at(self, done: int, total: int) -> Callable[[str], None]:
        """Return the function that takes the name of what runs now."""
        return lambda name: self.progress(name, done, total)

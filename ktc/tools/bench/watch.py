"""The progress of a run, as its parts report it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Watch:
    """`stage` is the compiler's `observe`, `progress` a part's name with done and total, `told` a finished part."""

    stage: Callable[[str, object], None]
    progress: Callable[[str, float, float], None]
    told: Callable[[str], None]

    def part(self, name: str) -> Callable[[int, int], None]:
        """Return the function that takes done and total of a part."""
        return lambda done, total: self.progress(name, done, total)

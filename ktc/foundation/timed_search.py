"""Search module names with regular expressions of untrusted files: KTransformers' rules, configs of adapters.

In: expressions of an untrusted file, and names. Out: the names that `re.search` finds, as in KTransformers. Refused:
expressions that `re` refuses, and those that exceed a limit of processor time or memory. `re` can take exponential time
and cannot be interrupted, so a process of its own searches (`timed_search_process.py`).
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_SECONDS = 5.0  # of processor time, for all expressions of a file: a usual file takes milliseconds
MAX_BYTES = 1 << 30
_SCRIPT = Path(__file__).with_name("timed_search_process.py")


@dataclass(frozen=True, slots=True)
class Invalid:
    """An expression that `re` refuses, in its words."""

    reason: str


class TooMuchWork(Exception):
    """A limit was reached; `index` is the expression that was searched then."""

    def __init__(self, index: int, limit: str) -> None:
        super().__init__(f"it takes more than {limit}")
        self.index = index


def search(expressions: Sequence[str], names: Sequence[str]) -> list[frozenset[str] | Invalid]:
    """Return for each expression the names that `re.search` finds it in.

    Raises:
        TooMuchWork: a limit of time or memory was reached.
    """
    task = {"expressions": expressions, "names": names, "seconds": MAX_SECONDS, "bytes": MAX_BYTES}
    command = [sys.executable, "-I", "-S", str(_SCRIPT)]
    done = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True, check=False)
    answers: list[list[int] | str] = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode == -signal.SIGPROF:
        raise TooMuchWork(len(answers), f"{MAX_SECONDS:g} seconds of processor time")
    if "MemoryError" in done.stderr:
        raise TooMuchWork(len(answers), f"{MAX_BYTES >> 20} MiB of memory")
    assert done.returncode == 0, f"the search failed: {done.stderr}"
    return [
        Invalid(found) if isinstance(found, str) else frozenset(names[index] for index in found) for found in answers
    ]

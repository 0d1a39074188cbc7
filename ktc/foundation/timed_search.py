"""Search module names with regular expressions of untrusted files: KTransformers' rules, configs of adapters.

`re` can take exponential time and cannot be interrupted, so a process of its own searches: this file as a script, which
imports the standard library alone for a quick start. Its stdin is JSON: `expressions`, `names`, and the limits
`seconds` of processor time and `bytes` of memory. It answers a line of JSON per expression: the indices of the names
with a match, or the reason why `re` refuses it. SIGPROF or a MemoryError ends it at a limit.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

MAX_SECONDS = 5.0  # of processor time, for all expressions of a file: a usual file takes milliseconds
MAX_BYTES = 1 << 30


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
    command = [sys.executable, "-I", "-S", __file__]
    done = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True, check=False)
    answers: list[list[int] | str] = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode == -signal.SIGPROF:
        raise TooMuchWork(len(answers), f"{MAX_SECONDS:g} seconds of processor time")
    if "MemoryError" in done.stderr:
        raise TooMuchWork(len(answers), f"{MAX_BYTES >> 20} MiB of memory")
    assert done.returncode == 0, f"the search failed: {done.stderr}"
    return [
        Invalid(answer) if isinstance(answer, str) else frozenset(map(names.__getitem__, answer)) for answer in answers
    ]


def _answer(expression: str, names: Sequence[str]) -> list[int] | str:
    try:
        compiled = re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        return str(error)
    return [index for index, name in enumerate(names) if compiled.search(name)]


def _main() -> None:
    task = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (task["bytes"], task["bytes"]))
    signal.setitimer(signal.ITIMER_PROF, task["seconds"])
    for expression in task["expressions"]:
        sys.stdout.write(json.dumps(_answer(expression, task["names"])) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main()

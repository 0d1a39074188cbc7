"""A process that searches module names with the regular expressions of an untrusted file, and can be stopped.

In: JSON on standard input: `expressions`, `names`, and the limits `seconds` of processor time and `bytes` of memory.
Out: a line of JSON per expression: the indices of the names that `re.search` finds it in, or the reason why `re`
refuses it. At a limit the process ends, by SIGPROF or a MemoryError, after the lines of the expressions before.
`timed_search.py` runs this file as a script. It imports the standard library alone, for a quick start.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from collections.abc import Sequence


def answer(expression: str, names: Sequence[str]) -> list[int] | str:
    """Return the indices of the names that hold a match, or the reason why the expression is invalid."""
    try:
        compiled = re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        return str(error)
    return [index for index, name in enumerate(names) if compiled.search(name)]


def main() -> None:
    task = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (task["bytes"], task["bytes"]))
    signal.setitimer(signal.ITIMER_PROF, task["seconds"])
    for expression in task["expressions"]:
        sys.stdout.write(json.dumps(answer(expression, task["names"])) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

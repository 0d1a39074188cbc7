"""Examine families in parallel, each in a process of its own: a crash or a hang of one costs its own row alone.

Input: names, the number of processes, a time limit. Output: rows in the order in which they finish. A server process
imports the libraries once; each family starts as its copy, which takes milliseconds.
"""

from __future__ import annotations

import logging
import math
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Final, cast

import torch

from census.run import examine
from census.types import Family
from ktc.foundation.host import available_memory, usable_threads

TIMEOUT = 900.0  # seconds; the slowest family takes a tenth of it on a core of its own
# what takes long to import
_PRELOADED: Final = (
    "ktc.compiler",
    "ktc.stages.proof",
    "ktc.stages.link.adapter",
    "ktc.model.loading.peft_glue",
)
_PAUSES: Final = (0.1, 1.0)  # seconds before a process is started again
BYTES = 3 << 29  # of memory for a family; the largest measured takes half of it


@dataclass(frozen=True, slots=True)
class _Running:
    """A family in its process. At `rows` arrive True when it begins, then its row; `deadline` counts from the begin."""

    family: str
    process: ForkServerProcess
    rows: Connection
    started: float
    deadline: float = math.inf


def default_jobs() -> int:
    """Return how many families are examined at once: one per usable thread, as far as free memory allows."""
    return max(1, min(usable_threads(), available_memory() // BYTES))


def examine_all(
    families: Sequence[str], jobs: int, timeout: float, examine: Callable[[str], Family] = examine
) -> Generator[Family]:
    """Yield the row of each family when it is finished, `jobs` at a time.

    A family that takes more than `timeout` seconds, or whose process dies, has that as its reason. Closing the iterator
    ends the running processes.
    """
    waiting, running = deque(families), dict[str, _Running]()
    try:
        while waiting or running:
            while waiting and len(running) < max(1, jobs):
                family = waiting.popleft()
                try:
                    running[family] = _start(examine, family)
                except (EOFError, ConnectionError) as error:
                    yield Family(
                        family, reasons=(f"its process could not be started: {str(error) or type(error).__name__}",)
                    )
            if not running:
                continue
            soonest = min(each.deadline for each in running.values())
            ready = wait([each.rows for each in running.values()], _until(soonest))
            for each in list(running.values()):
                answer = _answer(each) if each.rows in ready else None
                if answer is True:
                    now = time.monotonic()
                    running[each.family] = replace(each, started=now, deadline=now + timeout)
                    continue
                if answer is None and time.monotonic() < each.deadline:
                    continue
                if answer is not None:
                    each.process.join(5.0)  # a process that is killed leaves its locks to a warning at the exit
                _end(running.pop(each.family))
                yield answer or _failed(each, f"not finished after {timeout:g} s (--timeout)")
    finally:
        for each in running.values():
            _end(each)


def _until(deadline: float) -> float | None:
    return None if deadline == math.inf else max(0.0, deadline - time.monotonic())


def _start(examine: Callable[[str], Family], family: str) -> _Running:
    context = get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    rows, theirs = cast("tuple[Connection, Connection]", context.Pipe(duplex=False))
    process = context.Process(target=_report, args=(examine, family, theirs), daemon=True)
    for pause in _PAUSES:
        try:
            process.start()
            break
        except (EOFError, ConnectionError):  # the system ended the server of forks: once it is gone, another one starts
            time.sleep(pause)
    else:
        process.start()
    theirs.close()  # so that the death of the process is the end of its rows
    return _Running(family, process, rows, time.monotonic())


def _report(examine: Callable[[str], Family], family: str, rows: Connection) -> None:
    """Examine one family; the body of its process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its processes and keeps the finished rows
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns about the unusual configs of twins
    warnings.simplefilter("ignore")  # of libraries, likewise
    torch.set_num_threads(1)  # twins are too small for several threads
    rows.send(True)
    rows.send(examine(family))


def _answer(running: _Running) -> Family | bool:
    """Return what a process sent: True, or its row; for one that died, a row with that reason."""
    try:
        answer = running.rows.recv()
    except EOFError:
        running.process.join()
        return _failed(running, f"its process ended with exit code {running.process.exitcode}")
    assert isinstance(answer, Family | bool)
    return answer


def _failed(running: _Running, reason: str) -> Family:
    return Family(running.family, reasons=(reason,), seconds=time.monotonic() - running.started)


def _end(running: _Running) -> None:
    running.rows.close()
    running.process.kill()
    running.process.join()

"""`ktc train` in several processes of this machine, each with a GPU: the same command, once for each.

In: a compiled model and the settings of a run. Out: the number of processes, and their exit code. Signals go to all of
them. When one fails, the others get a while to name it, and are then ended.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

from ktc.cli.session import Session
from ktc.foundation import environment

if TYPE_CHECKING:
    from ktc.training.tune.settings import TrainSettings

_POLL: Final = 0.2  # seconds
_OTHERS: Final = 20.0  # seconds in which processes notice that another one has failed
_SAVING: Final = 60.0  # seconds after SIGTERM, which ends a step with a checkpoint


def count_of(session: Session, out: Path, settings: TrainSettings) -> int:
    """Return the number of processes that train the model in `out`: as asked, or as planned if this machine has them.

    Raises as `read_manifest` does.
    """
    if environment.world_size() > 1 or settings.processes == 1:
        return 1
    if settings.processes is not None:
        return settings.processes
    from ktc.model.manifest.manifest import read_manifest

    planned = read_manifest(out).processes
    if planned == 1:
        return 1
    import torch

    why = ""
    if torch.cuda.device_count() < planned:
        why = f"this machine shows {torch.cuda.device_count()} GPUs"
    elif settings.accumulation % planned:
        why = f"they cannot share {settings.accumulation} micro-batches evenly"
    if why:
        session.tell(f"one process instead of the {planned} that were planned: {why}")
    return 1 if why else planned


def run_in_processes(session: Session, out: Path, count: int) -> int:
    """Run this command again in `count` processes for the model in `out`, and return its exit code."""
    from ktc.foundation import host

    command = [sys.executable, "-m", "ktc", *sys.argv[1:]]
    threads = max(1, host.detect().workers // count)
    session.tell(f"training in {count} processes, each with its part of a step and of the cores")
    started = [
        subprocess.Popen(command, env=variables, stdout=session.stdout, start_new_session=True)
        for variables in environment.of_processes(out, count, threads)
    ]
    try:
        with _forwarding(started):
            return _ended(started)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()


def _ended(started: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all processes; return the exit code of the first that failed, 0 if none did."""
    code, deadline, told = 0, 0.0, False
    while running := [process for process in started if process.poll() is None]:
        failed = next((process.returncode for process in started if process.returncode), 0)
        if failed and not code:
            code, deadline = failed, time.monotonic() + _OTHERS
        if code and time.monotonic() > deadline:
            if told:
                break
            for process in running:
                process.terminate()
            told, deadline = True, time.monotonic() + _SAVING
        time.sleep(_POLL)
    code = code or next((process.returncode for process in started if process.returncode), 0)
    return 128 - code if code < 0 else code


@contextmanager
def _forwarding(started: Sequence[subprocess.Popen[bytes]]) -> Generator[None]:
    """Send SIGINT and SIGTERM on to all processes."""

    def forward(number: int, frame: FrameType | None) -> None:
        for process in started:
            with suppress(ProcessLookupError):
                process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

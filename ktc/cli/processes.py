"""`ktc train` in several processes of this machine, each with a GPU: the same command, once for each.

In: a compiled model and the settings of a run. Out: the number of processes, and their exit code. Each leaves its
diagnostics and its object of `--json` in a folder (`ktc.cli.started`), and the starter shows each error once. Signals
go to all of them. When one fails before the first step, the others are ended; later they get a while to name it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import typer

from ktc.cli.session import Session
from ktc.cli.started import BEGUN, events_in
from ktc.diagnostics import Diagnostic
from ktc.foundation import environment

if TYPE_CHECKING:
    from ktc.training.tune.settings import TrainSettings

_POLL: Final = 0.2  # seconds
_OTHERS: Final = 20.0  # seconds in which processes notice that another one has failed
_SAVING: Final = 60.0  # seconds after SIGTERM, which ends a step with a checkpoint
_WAITING: Final = 5.0  # seconds after SIGTERM where no step has begun
# What processes receive for a signal to their starter. SIGHUP means that the terminal is gone: a run ends with a
# checkpoint.
_FORWARDED: Final[Mapping[signal.Signals, signal.Signals]] = {
    signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM,
    signal.SIGQUIT: signal.SIGQUIT,
}  # fmt: skip
_LOST: Final = "T534"
_GPU_MEMORY: Final = "U116"


def count_of(session: Session, out: Path, settings: TrainSettings) -> int:
    """Return the number of processes that train the model in `out`: as asked, or as planned if this machine has them.

    Raises as `read_manifest` does, and as `process_gpu.require_gpus` does for the number that was given.
    """
    if environment.is_in_world() or settings.processes == 1:
        return 1
    from ktc.model.manifest.manifest import read_manifest

    manifest = read_manifest(out)
    if settings.processes is not None:
        from ktc.model.packed_store import process_gpu

        process_gpu.require_gpus(manifest, out, settings.processes)
        return settings.processes
    planned = manifest.processes
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


def run_in_processes(session: Session, out: Path, count: int, *, may_fall_back: bool) -> frozenset[str]:
    """Run this command again in `count` processes for the model in `out`, and end with their exit code.

    Where one found too little memory on its GPU and the run `may_fall_back` to one process, warn of it (U118) and
    return the events that the run had.

    Raises:
        typer.Exit: The processes have ended, well or not.
    """
    from ktc.foundation import host

    threads = max(1, host.detect().workers // count)
    session.tell(f"training in {count} processes, each with its part of a step and of the cores")
    with tempfile.TemporaryDirectory(prefix="ktc-train-") as folder:
        reports = Path(folder)
        code, lost = _run(environment.of_processes(out, count, threads, reports), session.stdout, reports)
        results = [_result(reports, rank) for rank in range(count)]
        events = events_in(reports)
    errors = [error for result in results for error in _errors(result)]
    short = next((error for error in errors if error.code == _GPU_MEMORY), None)
    if code and short is not None and may_fall_back:
        message = f"{short.message}; one process runs instead of {count}"
        hint = "end other programs on the GPUs before the next run, or give `--processes 1`"
        session.diagnose([Diagnostic("U118", message, hint=hint, severity="warning")])
        return events
    session.adopt(results[0])
    if code:
        vanished = [(rank, status) for rank, status in lost if not results[rank]]
        session.diagnose(_unseen(_errors(results[0]), errors, vanished))
    raise typer.Exit(code)


def _run(variables: Sequence[Mapping[str, str]], stdout: int, reports: Path) -> tuple[int, list[tuple[int, int]]]:
    """Run one process for each set of variables; return the exit code, and the ranks that failed with their statuses.

    All of them hold the end of a pipe to this process, and end when it is gone.
    """
    watched, kept_open = os.pipe()
    command = [sys.executable, "-P", "-m", "ktc", *sys.argv[1:]]  # -P: no code of the working directory
    started = list[subprocess.Popen[bytes]]()
    try:
        for one in variables:
            of_one = {**one, environment.STARTER_PIPE: str(watched)}
            process = subprocess.Popen(command, env=of_one, stdout=stdout, start_new_session=True, pass_fds=[watched])
            started.append(process)
        with _forwarding(started) as sent:
            code, lost = _ended(started, lambda: BEGUN in events_in(reports))
        return code, [] if sent else lost
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
        os.close(watched)
        os.close(kept_open)


def _ended(started: Sequence[subprocess.Popen[bytes]], begun: Callable[[], bool]) -> tuple[int, list[tuple[int, int]]]:
    """Wait for all processes; return the exit code of the first that failed, 0 if none did.

    Also return the ranks that failed before others were ended, with their statuses. Where no step has `begun`, the
    others may wait for the one that failed, and are ended at once.
    """
    lost, deadline, told = list[tuple[int, int]](), 0.0, False
    while running := [process for process in started if process.poll() is None]:
        if not told:
            failed = [(rank, process.returncode) for rank, process in enumerate(started) if process.returncode]
            if failed and not lost:
                deadline = time.monotonic() + (_OTHERS if begun() else 0.0)
            lost += [one for one in failed if one not in lost]
        if lost and time.monotonic() >= deadline:
            if told:
                break
            for process in running:
                process.terminate()
            told, deadline = True, time.monotonic() + (_SAVING if begun() else _WAITING)
        time.sleep(_POLL)
    if not told:
        failed = [(rank, process.returncode) for rank, process in enumerate(started) if process.returncode]
        lost += [one for one in failed if one not in lost]
    code = lost[0][1] if lost else 0
    return (128 - code if code < 0 else code), lost


@contextmanager
def _forwarding(started: Sequence[subprocess.Popen[bytes]]) -> Generator[list[int]]:
    """Send signals on to all processes, except those that this process ignores; yield those that were sent."""
    sent = list[int]()

    def forward(number: int, frame: FrameType | None) -> None:
        sent.append(number)
        for process in started:
            with suppress(ProcessLookupError):
                process.send_signal(_FORWARDED[signal.Signals(number)])

    taken = [number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in taken}
    try:
        yield sent
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _result(reports: Path, rank: int) -> dict[str, Any]:
    """Return what a process has left: the object of `--json` with its diagnostics; empty if it was killed."""
    try:
        return json.loads((reports / f"{rank}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _errors(result: Mapping[str, Any]) -> list[Diagnostic]:
    return [
        Diagnostic(one["code"], one["message"], hint=one["hint"] or "")
        for one in result.get("diagnostics", ())
        if one["severity"] == "error"
    ]


def _unseen(
    shown: Sequence[Diagnostic], errors: Iterable[Diagnostic], vanished: Iterable[tuple[int, int]]
) -> list[Diagnostic]:
    """Return the errors that rank 0 has not `shown`, without T534 of processes that others have ended."""
    further = [error for error in dict.fromkeys(errors) if error not in shown and error.code != _LOST]
    for rank, status in vanished:
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
        hint = "read what it wrote above; the system ends processes (SIGKILL) for which host memory is too small"
        further.append(Diagnostic(_LOST, f"process {rank} of this run {how}", hint=hint))
    return further

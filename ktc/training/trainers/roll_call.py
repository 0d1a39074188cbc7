"""Name the process of a run that is missing, when the others cannot continue without it.

Every process counts its meetings (the collectives of a training step) in the store that launched the run. When a
meeting fails, the counts show which ranks did not arrive. A process that raised an error has published its message
there. torchrun may end this process before its next meeting; then torchrun's own summary names the rank.
A process that dies inside a meeting is counted in; then the failed collective itself is what the others know.
Out: one error with the rank, its message, and the checkpoint to continue from.
"""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from transformers import trainer_utils

from ktc.diagnostics import Diagnostic, KtcError
from ktc.training.trainers.private_api import store_of_the_run

_LONGEST_WORDS = 500


class RollCall:
    """One process's view: call `arrive` before each meeting, and `missing` after one that failed."""

    def __init__(self) -> None:
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._store = store_of_the_run("ktc_roll_call")
        self._meetings = 0

    def arrive(self) -> None:
        """Count this process in at its next meeting."""
        self._meetings += 1
        self._store.set(f"meetings/{self._rank}", str(self._meetings))

    def leave(self, error: BaseException) -> None:
        """Publish this rank's error to the other ranks."""
        self._store.set(f"words/{self._rank}", f"{type(error).__name__}: {error}"[:_LONGEST_WORDS])

    def last_words(self) -> list[str]:
        """Return the other ranks that raised an error, with its message."""
        words = {rank: self._read(f"words/{rank}") for rank in self._others()}
        return [f"rank {rank} stopped with {text}" for rank, text in words.items() if text]

    def missing(self) -> list[str]:
        """Return the ranks that raised an error; if none did, the ranks that have not arrived at this meeting."""
        behind = [rank for rank in self._others() if int(self._read(f"meetings/{rank}") or 0) < self._meetings]
        return self.last_words() or [f"rank {rank} did not arrive" for rank in behind]

    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""


class _ToldToEnd(BaseException):
    """SIGTERM, received anywhere in this process."""


@contextmanager
def together(call: RollCall, output_dir: str | None) -> Generator[None]:
    """Run the body as one of several processes, and publish its error to the others.

    Raises:
        KtcError: T534, instead of a collective's own error if another process caused it, and if torchrun ends this
            process because of another.
    """
    try:
        with _told_to_end():
            yield
    except _ToldToEnd as end:
        message = "this process received SIGTERM, which torchrun sends when another process of the run has failed"
        said = _said(call) or "torchrun's summary names it"
        raise _ended(f"{message}: {said}", output_dir) from end
    except RuntimeError as error:
        raise _lost(call, error, output_dir) from error
    except Exception as error:
        _tell(call, error)
        raise


@contextmanager
def _told_to_end() -> Generator[None]:
    """Turn SIGTERM into an exception in the body, unless a handler is installed."""
    free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not free or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise _ToldToEnd

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _said(call: RollCall) -> str:
    """Return the errors that the other processes published."""
    try:
        return "; ".join(call.last_words())
    except RuntimeError:
        return ""


def _lost(call: RollCall, error: RuntimeError, output_dir: str | None) -> Exception:
    """Return the error to raise for `error`: itself if no other process is missing and no collective raised it."""
    try:
        missing = call.missing()
    except RuntimeError:
        missing = ["rank 0, which keeps the roll, is gone"]
    if not missing and not _in_collective(error):
        _tell(call, error)
        return error
    lost = "; ".join(missing) or f"a collective failed with: {str(error)[:_LONGEST_WORDS].strip()}"
    return _ended(f"a run continues in all of its processes or in none: {lost}", output_dir)


def _in_collective(error: BaseException) -> bool:
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(str(frame.f_globals.get("__name__")).startswith("torch.distributed.") for frame in frames)


def _tell(call: RollCall, error: BaseException) -> None:
    try:
        call.leave(error)
    except RuntimeError:
        return  # the store is gone; the error itself is raised anyway


def _ended(message: str, output_dir: str | None) -> KtcError:
    newest = cast("Any", trainer_utils).get_last_checkpoint
    last: str | None = newest(output_dir) if output_dir and Path(output_dir).is_dir() else None
    kept = f"the last checkpoint is `{last}`" if last else "there is no checkpoint yet"
    hint = "look above for what that process said, then start the run again" + (" from that checkpoint" if last else "")
    return KtcError(Diagnostic("T534", f"{message}; {kept}", hint=hint))

"""Which process of a run is missing, when the others cannot go on without it.

Every process counts the meetings it comes to (the collectives of a training step) in the store that launched the run.
When one fails, the counts say who did not come, and a process that raised an error has left its words there. torchrun
may be quicker, and end this process before its next meeting; then torchrun's own summary names the rank.
Out: one error with the rank, what it said, and the checkpoint to go on from.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from transformers import trainer_utils

from ktc.diagnostics import Diagnostic, KtcError
from ktc.training.private_api import store_of_the_run

_LONGEST_WORDS = 500


class RollCall:
    """One process's view: `arrive` before each meeting, `missing` after one that failed."""

    def __init__(self) -> None:
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._store = store_of_the_run("ktc_roll_call")
        self._meetings = 0

    def arrive(self) -> None:
        """This process is at its next meeting."""
        self._meetings += 1
        self._store.set(f"meetings/{self._rank}", str(self._meetings))

    def leave(self, error: BaseException) -> None:
        """This process goes, with its last words for the others."""
        self._store.set(f"words/{self._rank}", f"{type(error).__name__}: {error}"[:_LONGEST_WORDS])

    def last_words(self) -> list[str]:
        """The other ranks that raised an error, with what it said."""
        words = {rank: self._read(f"words/{rank}") for rank in self._others()}
        return [f"rank {rank} stopped with {text}" for rank, text in words.items() if text]

    def missing(self) -> list[str]:
        """The ranks that raised an error; if none did, those that have not come to this meeting."""
        behind = [rank for rank in self._others() if int(self._read(f"meetings/{rank}") or 0) < self._meetings]
        return self.last_words() or [f"rank {rank} did not come" for rank in behind]

    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""


class _ToldToEnd(BaseException):
    """SIGTERM, wherever this process was."""


@contextmanager
def together(call: RollCall, output_dir: str | None) -> Generator[None]:
    """Runs the body as one of several processes. An error of it is told to the others.

    Raises KtcError (T534) in place of a collective's own error, where the others are what is wrong, and of a silent end
    where torchrun ends this process because of another.
    """
    try:
        with _told_to_end():
            yield
    except _ToldToEnd as end:
        message = "this process was told to end, as torchrun does when another of the run has failed"
        said = _said(call) or "torchrun's summary names it"
        raise _ended(f"{message}: {said}", output_dir) from end
    except RuntimeError as error:
        raise _lost(call, error, output_dir) from error
    except Exception as error:
        _tell(call, error)
        raise


@contextmanager
def _told_to_end() -> Generator[None]:
    """SIGTERM becomes an exception in the body, where nobody else has use for it."""
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
    """The last words of the other processes."""
    try:
        return "; ".join(call.last_words())
    except RuntimeError:
        return ""


def _lost(call: RollCall, error: RuntimeError, output_dir: str | None) -> Exception:
    """The error to raise for `error`: itself, where no other process is missing."""
    try:
        missing = call.missing()
    except RuntimeError:
        missing = ["rank 0, which keeps the roll, is gone"]
    if not missing:
        _tell(call, error)
        return error
    return _ended(f"this run goes on in all its processes or in none: {'; '.join(missing)}", output_dir)


def _tell(call: RollCall, error: BaseException) -> None:
    try:
        call.leave(error)
    except RuntimeError:
        return  # nobody keeps the roll any more; the error itself is raised all the same


def _ended(message: str, output_dir: str | None) -> KtcError:
    newest = cast("Any", trainer_utils).get_last_checkpoint
    last: str | None = newest(output_dir) if output_dir and Path(output_dir).is_dir() else None
    kept = f"the last checkpoint is `{last}`" if last else "there is no checkpoint yet"
    hint = "look above for what that process said, then start the run again" + (" from that checkpoint" if last else "")
    return KtcError(Diagnostic("T534", f"{message}; {kept}", hint=hint))

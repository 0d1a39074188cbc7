"""Name the process of a run that is missing, when the others cannot continue without it.

Every process counts the collectives of its training steps in the store that launched the run. When one fails, the
counts show which ranks did not arrive. A process that raised an error has published its message there. torchrun may
end this process before its next collective; then torchrun's own summary names the rank. A process that dies inside a
collective has already reported arrival: the others then know the failed collective alone.
Out: one error with the rank, its message, and the checkpoint to continue from.
"""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from ktc.diagnostics import Diagnostic, KtcError
from ktc.training.trainers.checkpoints import checkpoints, last_kept
from ktc.training.trainers.private_api import store_of_the_run

_MOST_CHARACTERS = 500  # of another process's message


class RankLiveness:
    """One process's view: call `arrive` before each collective, and `missing` after one that failed."""

    def __init__(self) -> None:
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._store = store_of_the_run("ktc_rank_liveness")
        self._collectives = 0

    def arrive(self) -> None:
        """Publish that this process has arrived at its next collective."""
        self._collectives += 1
        self._store.set(f"collectives/{self._rank}", str(self._collectives))

    def publish(self, error: BaseException) -> None:
        """Publish this rank's error to the other ranks, if the store of the run still exists."""
        with suppress(RuntimeError):
            self._store.set(f"errors/{self._rank}", f"{type(error).__name__}: {error}"[:_MOST_CHARACTERS])

    def published_errors(self) -> list[str]:
        """Return the other ranks that raised an error, with its message."""
        messages = {rank: self._read(f"errors/{rank}") for rank in self._others()}
        return [f"rank {rank} stopped with {message}" for rank, message in messages.items() if message]

    def missing(self) -> list[str]:
        """Return the ranks that raised an error; if none did, the ranks that have not arrived at this collective."""
        behind = [rank for rank in self._others() if int(self._read(f"collectives/{rank}") or 0) < self._collectives]
        return self.published_errors() or [f"rank {rank} did not arrive" for rank in behind]

    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""


class _Terminated(BaseException):
    """SIGTERM, received anywhere in this process."""


@contextmanager
def together(ranks: RankLiveness, output_dir: str | None) -> Generator[None]:
    """Run the body as one of several processes, and publish its error to the others.

    Raises:
        KtcError: T534, instead of a collective's own error if another process caused it, and if torchrun ends this
            process because of another.
    """
    try:
        with _sigterm_as_exception():
            yield
    except _Terminated as end:
        errors = list[str]()
        with suppress(RuntimeError):
            errors = ranks.published_errors()
        message = "this process received SIGTERM, which torchrun sends when another process of the run has failed"
        raise _ended(f"{message}: {'; '.join(errors) or 'its summary names the process'}", output_dir) from end
    except RuntimeError as error:
        raise _lost(ranks, error, output_dir) from error
    except Exception as error:
        ranks.publish(error)
        raise


@contextmanager
def _sigterm_as_exception() -> Generator[None]:
    """Turn SIGTERM into an exception in the body, unless a handler is installed."""
    has_handler = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    if has_handler or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise _Terminated

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _lost(ranks: RankLiveness, error: RuntimeError, output_dir: str | None) -> Exception:
    """Return the error to raise for `error`: itself if no other process is missing and no collective raised it."""
    try:
        missing = ranks.missing()
    except RuntimeError:
        missing = ["rank 0, which serves the store of the run, is gone"]
    if not missing and not _in_collective(error):
        ranks.publish(error)
        return error
    lost = "; ".join(missing) or f"a collective failed with: {str(error)[:_MOST_CHARACTERS].strip()}"
    return _ended(f"a run continues in all of its processes or in none: {lost}", output_dir)


def _in_collective(error: BaseException) -> bool:
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(str(frame.f_globals.get("__name__")).startswith("torch.distributed.") for frame in frames)


def _ended(message: str, output_dir: str | None) -> KtcError:
    last = next(iter(checkpoints(Path(output_dir))), None) if output_dir else None
    kept = last_kept(Path(output_dir) if output_dir else None)
    hint = "read that process's own message, then start the run again" + (" from that checkpoint" if last else "")
    return KtcError(Diagnostic("T534", f"{message}; {kept}", hint=hint))

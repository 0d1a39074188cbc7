"""A process that `ktc train` has started beside others: what it reports to its starter, and how it ends with it.

In: the variables of `ktc.foundation.environment`. Out: files in the starter's folder, one for each event that the
starter waits for; `Session` adds the diagnostics. A process whose starter is gone stops with a checkpoint.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from ktc.foundation import environment

CLAIMED: Final = "folder"  # the event of a run that has claimed its folder
BEGUN: Final = "model"  # the event of a run before its first step
_SAVING: Final = 60.0  # seconds that a step and its checkpoint may take
_ENDING: Final = ".event"


def watch_starter() -> None:
    """Stop this process when its starter is gone: by SIGTERM, and by SIGKILL where that is not enough."""
    if (pipe := environment.starter_pipe()) is None:
        return
    os.set_inheritable(pipe, False)

    def watch() -> None:
        with suppress(OSError):
            os.read(pipe, 1)  # nothing is written: it returns when no process can
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_SAVING)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def mark(event: str) -> None:
    """Report to the starter an event that it waits for: CLAIMED or BEGUN."""
    folder = environment.reports_folder()
    if folder is not None and event in (CLAIMED, BEGUN):
        with suppress(OSError):  # the starter is gone
            (folder / f"{event}{_ENDING}").touch()


def events_in(folder: Path) -> frozenset[str]:
    """Return the events that processes have reported to their starter."""
    return frozenset(file.stem for file in folder.glob(f"*{_ENDING}"))

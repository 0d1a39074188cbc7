"""Replacements of the examination of a family, in a module that other processes can import."""

from __future__ import annotations

import os
import signal
import time

from census import Family


def examine(name: str) -> Family:
    """Return a row at once, except of the families that hang and die."""
    if name == "hangs":
        time.sleep(600)
    if name == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    return Family(name, experts="matched", seconds=1.0)

"""Reads of the disk that has ktc's cache. The system's copy of the file is dropped before each, as far as it obeys.

A virtual machine's host may keep a copy of its own, which is not seen from here.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from ktc.foundation.files import folder_beside
from ktc.foundation.rates import Figure
from ktc.tools.measure.figures import repeated

_SIZE: Final = 256 << 20  # bytes
_PIECE: Final = 8 << 20
_BUDGET: Final = 1.0  # seconds


def disk(folder: Path, size: int = _SIZE) -> Figure:
    """Return bytes/s of sequential reads of a file in `folder`. Raises `OSError` where none can be written."""
    folder.mkdir(parents=True, exist_ok=True)
    with folder_beside(folder / "disk") as place:
        path = place / "random"
        with path.open("wb") as file:
            for _ in range(0, size, _PIECE):
                file.write(os.urandom(min(_PIECE, size)))
            file.flush()
            os.fsync(file.fileno())
        return repeated(lambda: size / _read(path), _BUDGET)


def _read(path: Path) -> float:
    """Return the seconds of one read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        buffer = bytearray(_PIECE)
        began = time.perf_counter()
        while os.readv(descriptor, [buffer]):
            pass
        return time.perf_counter() - began
    finally:
        os.close(descriptor)

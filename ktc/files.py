"""Files as a whole: written so that a reader finds all of them or nothing, made durable, and digested."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write UTF-8 text or bytes in place of the file at `path`: beside it, flushed to disk, then renamed.

    An error leaves the old file as it was, and no half-written one.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Make a file's bytes, or the names in a folder, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Files from outside: opened only if they are regular, and read only up to a size.

A pipe in place of a file would block its reader for ever, a device has no end, and a name from a manifest may be one
that no file can have. In: a path. Out: an open file, or its bytes. Raises OSError, whose `strerror` names the reason:
callers report it under their own codes.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path
from typing import Final

MOST_BYTES: Final = 256 << 20  # of a file that is read whole, such as JSON: parsed, it takes many times its bytes

_SHOWN: Final = 200  # characters of a name that is too long

_KINDS: Final = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class PathRefused(OSError):
    """The path is at fault, and not the machine: another kind of file, too large a one, or a name that none can have.

    The numbers are those of the system, which also mean faults of a disk: EFBIG is one of a write.
    """


class _Folder(PathRefused, IsADirectoryError):
    """A folder in the place of a file."""


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read its bytes. Raises OSError, also for a name that no file can have."""
    descriptor = open_descriptor(path)
    try:
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def open_descriptor(path: Path) -> int:
    """Open a regular file to read at positions, and return the descriptor. Raises OSError as `open_regular` does."""
    try:
        _require_regular(path, os.stat(path))  # before opening: this alone changes the state of some devices
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:  # a zero byte, or a lone surrogate
        raise PathRefused(errno.EINVAL, "no file can have this name", str(path)) from error
    try:
        _require_regular(path, os.fstat(descriptor))  # the file that was opened may be another one by now
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file. Raises OSError, also for more than `most_bytes`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = b"" if size > most_bytes else file.read(most_bytes + 1)
    if max(size, len(content)) > most_bytes:
        raise PathRefused(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
    if len(content) < size:
        raise OSError(errno.EIO, "it became shorter while it was read", str(path))
    return content


def require_regular(folder: Path, patterns: Iterable[str], most_bytes: int = MOST_BYTES) -> None:
    """Check the files of `folder` that another library is going to open by itself. Raises OSError for the first fault.

    Links are followed; those to nothing are left to that library.
    """
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            try:
                status = os.stat(path)
            except FileNotFoundError:
                continue
            _require_regular(path, status)
            if status.st_size > most_bytes:
                raise PathRefused(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))


def name_fault(error: BaseException) -> str:
    """Return why a path cannot be used, or "": too long, a loop, a zero byte, a pipe or a folder, too large a file."""
    of_name = isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP)
    if isinstance(error, OSError) and (of_name or isinstance(error, PathRefused)):
        return f"`{str(error.filename)[:_SHOWN]}` cannot be opened: {error.strerror}"
    words = str(error)
    if isinstance(error, RuntimeError) and words.startswith("Symlink loop from "):  # of `Path.resolve`
        name = words.removeprefix("Symlink loop from ").strip("'")
        return f"`{name[:_SHOWN]}` cannot be opened: it is a link to itself"
    if isinstance(error, ValueError) and words == "embedded null byte":
        return "a `path` that has a zero byte cannot be opened"
    return ""


def _require_regular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    if stat.S_ISDIR(status.st_mode):
        raise _Folder(errno.EISDIR, "it is a folder", str(path))
    kind = next((name for matches, name in _KINDS if matches(status.st_mode)), "not a file")
    raise PathRefused(errno.EINVAL, f"it is {kind}, not a regular file", str(path))

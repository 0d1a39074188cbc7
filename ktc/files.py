"""Files and folders that a reader finds whole or not at all: the one place that writes beside, flushes and renames.

In: a path and its content. Out: the content at that path, safe from a loss of power. After an error or a kill, `path`
is unchanged; an error also leaves nothing beside it. Raises OSError; callers report it under their own codes.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.regular_files import open_regular

_UNFINISHED = ".writing"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def write_file(path: Path, content: str | bytes) -> None:
    """Write UTF-8 text or bytes in place of what is at `path`. A device or a pipe there is written to directly."""
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_bytes(data)
        return
    with replaced_file(path) as beside:
        beside.write_bytes(data)


@contextmanager
def replaced_file(path: Path) -> Generator[Path]:
    """Yield the path of a file to write, which replaces the one at `path` when the block ends."""
    path = path.resolve()  # a link stays, and what it points to is replaced
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}{_UNFINISHED}")
    try:
        yield beside
        if path.exists():
            shutil.copymode(path, beside)
        move_file(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def move_file(finished: Path, path: Path) -> None:
    """Flush a finished file and rename it to `path`, which it replaces."""
    flush(finished)
    os.rename(finished, path)
    flush(path.parent)


@contextmanager
def new_folder(path: Path) -> Generator[Path]:
    """Yield a folder to fill, which becomes `path` when the block ends. Raises OSError if `path` exists by then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{path.name}-", suffix=_UNFINISHED, dir=path.parent))
    try:
        yield beside
        finish_folder(beside)
        os.rename(beside, path)
        flush(path.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def finish_folder(folder: Path) -> None:
    """Make a private folder readable for everybody and flush everything in it, from the bottom up."""
    folder.chmod(0o755)
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            flush(Path(parent) / name)
        flush(Path(parent))


def exchange(one: Path, other: Path) -> bool:
    """Swap two files or folders in one step. Return False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    done = rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    if done != 0 and ctypes.get_errno() not in (errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ENOTSUP):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done == 0


def remove_unfinished(folder: Path) -> None:
    """Remove the files that killed writers left in `folder`. The caller is its only writer."""
    for left in folder.glob(f".*{_UNFINISHED}"):
        left.unlink()


def flush(path: Path) -> None:
    """Make a file's bytes, or a folder's names, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path) -> str:
    """Return the sha256 of a regular file's bytes, in hex."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def refusing(path: Path, code: str = "U003") -> Generator[None]:
    """Turn an OSError inside the block into InputRefused: `path` cannot be written."""
    try:
        yield
    except OSError as error:
        raise InputRefused(Diagnostic(code, f"cannot write `{path}`: {error.strerror or error}")) from error

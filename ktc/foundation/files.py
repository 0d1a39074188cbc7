"""Files and folders that a reader finds whole or not at all: written in a hidden folder, flushed and renamed.

In: a path and its content. Out: the content at that path, safe from a loss of power. After an error or a kill, `path`
is unchanged. Unfinished content is in a hidden folder `.NAME-xxxxxxxx.writing` beside `path`, which its writer locks:
an error removes it, and the next writer in that place removes those of dead processes. Raises OSError; callers report
it under their own codes.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from ktc.foundation.machine_faults import failed, fault_in
from ktc.foundation.regular_files import open_regular

_UNFINISHED: Final = re.compile(r"(?:\.|ktc-).+-[a-z0-9_]{8}\.writing", re.DOTALL)
_SUFFIX: Final = ".writing"
_LONGEST_NAME: Final = 255 - len("..-xxxxxxxx") - len(_SUFFIX)  # bytes
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def write_file(path: Path, content: str | bytes) -> None:
    """Write UTF-8 text or bytes to `path`, in place of an earlier file. A device or a pipe is written to directly."""
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_bytes(data)
        return
    with replaced_file(path) as draft:
        draft.write_bytes(data)


@contextmanager
def replaced_file(path: Path) -> Generator[Path]:
    """Yield the path of a file to write, which replaces the one at `path` when the block ends."""
    path = path.resolve()  # a link stays, and what it points to is replaced
    path.parent.mkdir(parents=True, exist_ok=True)
    with folder_beside(path) as work:
        yield work / path.name
        if path.exists():
            shutil.copymode(path, work / path.name)
        move_file(work / path.name, path)


def move_file(finished: Path, path: Path) -> None:
    """Flush a finished file and rename it to `path`, which it replaces."""
    flush(finished)
    os.rename(finished, path)
    flush(path.parent)


@contextmanager
def new_folder(path: Path, replaces: bool = False) -> Generator[Path]:
    """Yield a folder to fill, which becomes `path` when the block ends.

    Raises OSError if `path` exists by then, except with `replaces`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with folder_beside(path) as draft:
        yield draft
        finish_folder(draft)
        put_folder(draft, path, replaces=replaces)


def put_folder(finished: Path, path: Path, *, replaces: bool = False) -> None:
    """Rename a finished folder to `path`. With `replaces`, what is at `path` is removed, and nothing if that fails."""
    if not replaces or not os.path.lexists(path):
        os.rename(finished, path)
    elif path.is_dir() and exchange(finished, path):
        shutil.rmtree(finished, ignore_errors=True)
    else:
        with folder_beside(path) as work:
            old = work / path.name
            os.rename(path, old)
            try:
                os.rename(finished, path)
            except OSError:
                os.rename(old, path)
                raise
    flush(path.parent)


@contextmanager
def files_into(folder: Path) -> Generator[Path]:
    """Yield a folder whose files replace those of `folder` when the block ends, one by one, JSON files last."""
    folder.mkdir(parents=True, exist_ok=True)
    with folder_beside(folder / "files") as draft:
        yield draft
        for file in sorted(draft.iterdir(), key=lambda file: (file.suffix == ".json", file.name)):
            move_file(file, folder / file.name)


# Unfinished folders --------------------------------------------------------------------------------------------------
@contextmanager
def folder_beside(path: Path, mark: str = "") -> Generator[Path]:
    """Yield a new hidden folder beside `path`, locked by this process, and remove it unless the block renamed it.

    First those that dead processes left there are removed. `mark` has the eight characters that are otherwise random,
    for processes that fill one folder together (`unfinished_name`).
    """
    remove_stale_temp(path.parent)
    with _locked_folder(f".{prefix_of(path)}", path.parent, mark) as folder:
        yield folder


def unfinished_name(path: Path, mark: str) -> str:
    """Return the name of the folder that `folder_beside` makes for `path` and `mark`."""
    return f".{prefix_of(path)}{mark}{_SUFFIX}"


@contextmanager
def temporary_folder(purpose: str) -> Generator[Path]:
    """Yield a new folder for temporary files, in one that this process locks, and remove both.

    Those of dead processes go too. The folder itself is not locked: writers of OUT lock the folder that it is made in.
    """
    parent = Path(tempfile.gettempdir())
    remove_stale_temp(parent)
    with _locked_folder(f"ktc-{purpose}-", parent) as locked:
        folder = locked / "files"
        folder.mkdir()
        yield folder


def prefix_of(path: Path) -> str:
    """Return the beginning of unfinished names of `path` after the dot, short enough for a file name."""
    return os.fsdecode(os.fsencode(path.name)[:_LONGEST_NAME]) + "-"


def remove_stale_temp(folder: Path) -> None:
    """Remove the unfinished folders of dead processes in `folder`, as far as possible."""
    for unfinished in leftovers(folder):
        remove_leftover(unfinished)


def leftovers(folder: Path) -> list[Path]:
    """Return the unfinished folders of dead processes directly in `folder`, none if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            # quick, in a folder of a million files
            hidden = (entry for entry in entries if entry.name.endswith(_SUFFIX))
            named = sorted(entry.path for entry in hidden if _UNFINISHED.fullmatch(entry.name))
    except (OSError, ValueError):  # a ValueError from a name with a null byte
        return []
    dead: list[Path] = []
    for path in map(Path, named):
        with _locked_if_dead(path) as is_dead:
            dead += [path] if is_dead else []
    return dead


def remove_leftover(unfinished: Path) -> bool:
    """Remove an unfinished folder if its writer is dead. Return whether it is gone."""
    with _locked_if_dead(unfinished) as is_dead:
        if is_dead:
            shutil.rmtree(unfinished, ignore_errors=True)
    return not os.path.lexists(unfinished)


@contextmanager
def _locked_if_dead(folder: Path) -> Generator[bool]:
    """Yield whether no living process has locked the folder; if so, it is locked while the block runs."""
    with ExitStack() as stack:
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # It is gone, a link or a file; or its writer has locked it; or the file system has no locks, where nothing
            # is removed.
            yield False
            return
        yield True


@contextmanager
def _locked_folder(prefix: str, parent: Path, mark: str = "") -> Generator[Path]:
    """Make a folder and lock it. Another writer may remove it between the two; then another one is made."""
    while True:
        folder = parent / f"{prefix}{mark or secrets.token_hex(4)}{_SUFFIX}"
        try:
            lock = _made_and_locked(folder)
        except FileExistsError:  # of another writer with the same mark
            raise
        except BaseException:  # an interrupt may come when the folder is made
            remove_leftover(folder)
            raise
        if lock is not None:
            break
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _made_and_locked(folder: Path) -> int | None:
    """Make a private folder, and return the descriptor that locks it; None if another writer removed it before."""
    folder.mkdir(0o700)
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        with suppress(OSError):  # a file system without locks: nothing is removed there
            fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return lock
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None


# Steps of a writer ---------------------------------------------------------------------------------------------------
def finish_folder(folder: Path) -> None:
    """Make a private folder readable for everybody and flush everything in it, from the bottom up."""
    folder.chmod(0o755)
    flush_folder(folder)


def flush_folder(folder: Path) -> None:
    """Flush everything in a folder, from the bottom up, and the folder."""
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
def refusing(path: Path, code: str = "U003", *, safe: str = "") -> Generator[None]:
    """Report an error of a write inside the block: `path` cannot be written, and its earlier content is whole.

    `safe` says what else was not lost. Raises HostLacks if the machine is at fault, otherwise InputRefused.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and fault_in(error) is None:
            raise
        there = f"what is at `{path}` is whole" if os.path.lexists(path) else f"nothing is at `{path}`"
        raise failed(error, code, f"cannot write `{path}`", safe=safe or there) from error

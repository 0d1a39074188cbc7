"""Folders that killed processes of ktc left behind: in the cache, among the temporary files and in the working folder.

In: the environment. Out: their paths and sizes; `remove` removes those whose writer is still dead.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ktc.foundation import files
from ktc.foundation.environment import cache_dir

_BUILD: Final = re.compile(r"[0-9a-f]{32}")  # a cached kernel library, complete when it has its record
_RECORD: Final = "library.json"


@dataclass(frozen=True, slots=True)
class Leftover:
    """An unfinished folder of a dead process, and the bytes of its files."""

    path: Path
    bytes: int


def find() -> tuple[Leftover, ...]:
    """Return what dead processes left, without changing anything."""
    return tuple(Leftover(path, _size(path)) for path in _paths())


def remove(left: Leftover) -> bool:
    """Remove it, and return whether it is gone."""
    if left.path.name.endswith(".writing"):
        return files.remove_leftover(left.path)
    with _build_lock(left.path) as free:
        if free:
            shutil.rmtree(left.path, ignore_errors=True)
    return not left.path.exists()


def _paths() -> Iterator[Path]:
    cache = cache_dir()
    places = [cache, *_folders(cache), Path(tempfile.gettempdir()), Path.cwd()]
    for place in dict.fromkeys(places):
        yield from files.leftovers(place)
    for build in _folders(cache / "kernels"):
        if _BUILD.fullmatch(build.name) and not (build / _RECORD).exists():
            with _build_lock(build) as free:
                if free:
                    yield build


def _folders(place: Path) -> list[Path]:
    try:
        return sorted(entry for entry in place.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return []


def _size(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())


@contextmanager
def _build_lock(build: Path) -> Generator[bool]:
    """Lock a kernel library as its builder does, and yield whether the lock was free."""
    from filelock import FileLock, Timeout

    lock = FileLock(build.with_suffix(".lock"))
    try:
        lock.acquire(timeout=0)
    except (OSError, Timeout):
        yield False
        return
    try:
        yield True
    finally:
        lock.release()

"""The shim itself: it counts what changes files, fails one call of it, and kills."""

from __future__ import annotations

import errno
import shutil
import sys
from pathlib import Path

import pytest

from ktc.foundation.host import find_compiler
from reliability.faults import KILL, Fault, Outcome, run_with_fault

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

PROGRAM = """
import os, shutil
with open('a', 'w') as file:
    file.write('text')
os.mkdir('b')
os.rename('a', 'b/c')
shutil.copyfile('b/c', 'd')
os.symlink('d', 'e')
os.link('d', 'f')
with open('d') as file:
    os.fsync(file.fileno())
shutil.rmtree('b')
"""
CALLS = [
    "open",
    "write",
    "mkdir",
    "rename",
    "open",
    "sendfile",
    "sendfile",
    "symlink",
    "link",
    "fsync",
    "unlinkat",
    "rmdir",
]


def outcome(folder: Path, error: str, at: int = 0, lasting: bool = False) -> Outcome:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return run_with_fault([sys.executable, "-I", "-c", PROGRAM], Fault((str(folder),), error, at, lasting), cwd=folder)


def test_every_call_that_changes_a_file_can_fail(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    counted = outcome(folder, "EIO")
    assert (counted.code, counted.calls, counted.injected) == (0, len(CALLS), 0)
    for number, call in enumerate(CALLS, 1):
        failed = outcome(folder, "EIO", number)
        assert failed.injected == 1
        assert failed.where.startswith(f"{call} {folder}/")
        asked_again = call == "sendfile" and CALLS[number] == "sendfile"  # shutil falls back to plain writes
        assert asked_again or (failed.code, failed.err.count(f"[Errno {errno.EIO}]")) == (1, 1), failed


def test_a_kill_comes_before_its_call(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    assert outcome(folder, KILL, 4).killed
    assert {path.name for path in folder.iterdir()} == {"a", "b"}


def test_a_full_disk_stays_full_and_lets_files_be_removed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    assert outcome(folder, "ENOSPC").calls == len(CALLS) - 2
    program = "import os\nfor n in range(3):\n try: open('x', 'w')\n except OSError: print('full')\n"
    failed = run_with_fault([sys.executable, "-I", "-c", program], Fault((str(folder),), "ENOSPC", 2, True), cwd=folder)
    assert (failed.out, failed.injected) == ("full\nfull\n", 2)


def test_files_elsewhere_are_not_counted(tmp_path: Path) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    ended = run_with_fault([sys.executable, "-I", "-c", PROGRAM], Fault((str(folder),), "EIO", 1), cwd=other)
    assert (ended.code, ended.calls) == (0, 0)

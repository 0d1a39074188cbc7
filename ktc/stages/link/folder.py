"""The folder OUT: write it as a whole or not at all.

In: a path and a function that fills a folder. Out: the folder. Refused: the refusals of `check_out`, a full disk.
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from ktc.diagnostics import KtcError
from ktc.foundation.files import exchange as _exchange
from ktc.foundation.files import finish_folder, flush, folder_beside, prefix_of
from ktc.foundation.machine_faults import failed, fault_in
from ktc.model.manifest.out_place import check_out

_OLD = "-old"  # suffix of the old OUT during the replacement, on a system that cannot swap folders


def write_folder(out: Path, fill: Callable[[Path], None], force: bool = False) -> None:
    """Fill a folder next to `out` and rename it to `out`. A failure leaves no new folder, and no parents either.

    The next call removes a folder that a killed process left next to `out`. Raises I145 if the system refuses a
    write: `HostLacks` where the machine is at fault, otherwise `InputRefused`.
    """
    out = out.absolute()
    check_out(out, force)
    made_parents: list[Path] = []
    try:
        made_parents = _make_parents(out.parent)
        _restore(out)
        with folder_beside(out) as unfinished:
            check_out(out, force)  # an old one may have been restored
            _fill_and_rename(unfinished, out, fill)
    except BaseException as error:
        for parent in reversed(made_parents):
            with suppress(OSError):  # another process put something there
                parent.rmdir()
        if isinstance(error, OSError) or (isinstance(error, Exception) and fault_in(error)):
            raise _not_written(out, error) from error
        raise


def _not_written(out: Path, error: Exception) -> KtcError:
    safe = f"the compiled model at `{out}` is whole" if out.exists() else f"nothing is at `{out}`"
    return failed(error, "I145", f"OUT `{out}` could not be written", safe=safe)


def _make_parents(parent: Path) -> list[Path]:
    """Make the missing folders above OUT and return them, outermost first."""
    absent = [path for path in (parent, *parent.parents) if not path.exists()]
    made: list[Path] = []
    for path in reversed(absent):
        path.mkdir(exist_ok=True)
        made.append(path)
    return made


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _fill_and_rename(unfinished: Path, out: Path, fill: Callable[[Path], None]) -> None:
    fill(unfinished)
    finish_folder(unfinished)
    _replace(unfinished, out)
    flush(out.parent)


def _replace(unfinished: Path, out: Path) -> None:
    """Move `unfinished` to `out`; an existing `out` is afterwards at `unfinished` or removed."""
    if not out.exists():
        os.rename(unfinished, out)
    elif not _exchange(unfinished, out):
        _replace_in_two_steps(unfinished, out)


def _replace_in_two_steps(unfinished: Path, out: Path) -> None:
    """Rename twice. A kill between the two leaves the old folder at `-old`; `_restore` puts it back."""
    old = unfinished.with_name(unfinished.name + _OLD)
    with _locked(out.parent):  # nothing is restored between the two
        os.rename(out, old)
        try:
            os.rename(unfinished, out)
        except OSError:
            os.rename(old, out)
            raise
    shutil.rmtree(old, ignore_errors=True)


def _restore(out: Path) -> None:
    """Put back the old OUT of a process that was killed between two renames, or remove it if there is a new one."""
    with _locked(out.parent):
        for old in sorted(out.parent.glob(f".{glob.escape(prefix_of(out))}*{_OLD}")):
            if os.path.lexists(out):
                shutil.rmtree(old, ignore_errors=True)
            else:
                os.rename(old, out)

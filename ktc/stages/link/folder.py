"""The folder OUT: check that it may be written, and write it as a whole or not at all.

In: a path and a function that fills a folder. Out: the folder. Refused: a name that cannot be imported, an existing
folder, a place that cannot be written, a full disk.
"""

from __future__ import annotations

import fcntl
import glob
import importlib.util
import keyword
import os
import re
import shlex
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from ktc.diagnostics import Diagnostic, InputRefused, KtcError
from ktc.foundation.files import exchange as _exchange
from ktc.foundation.files import finish_folder, flush, folder_beside, prefix_of
from ktc.foundation.machine_faults import failed, fault_in, is_machine_fault

_MARK = "ktc.json"  # identifies the folder of a compiled model
_OLD = "-old"  # suffix of the old OUT during the replacement, on a system that cannot swap folders


def check_out(out: Path, force: bool = False) -> None:
    """Raise `InputRefused` for an invalid OUT: I140 not an identifier, I141 shadows a module, I142 exists, I143 place.

    `force` permits the replacement of a folder that holds a compiled model. Call this before the long work.
    """
    out = out.absolute()
    if not out.name.isidentifier() or keyword.iskeyword(out.name):
        message = f"OUT `{out.name}` is not a Python identifier, and the compiled model is a package of that name"
        raise InputRefused(Diagnostic("I140", message, hint=_try(out.with_name(_suggestion(out.name)))))
    shadowed = _importable_from(out.name)
    if shadowed is not None and not _inside(shadowed, out):
        message = f"OUT `{out.name}` would shadow the module `{out.name}` ({shadowed})"
        raise InputRefused(Diagnostic("I141", message, hint=_try(out.with_name(f"{out.name}_ktc"))))
    if os.path.lexists(out):
        _check_replaceable(out, force)
    _check_place(out.parent)


def _try(out: Path) -> str:
    return f"try `{shlex.join(['-o', str(out)])}`"


def _suggestion(name: str) -> str:
    plain = re.sub(r"\W+", "_", name).strip("_") or "compiled"
    return f"model_{plain}" if plain[0].isdigit() or keyword.iskeyword(plain) else plain


def _importable_from(name: str) -> str | None:
    """Return where `import name` would find a module, `None` if nowhere. Plain folders without code do not count."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a half imported module counts as imported
        return "imported"
    return spec.origin if spec is not None else None


def _inside(origin: str, folder: Path) -> bool:
    return Path(origin).resolve().is_relative_to(folder.resolve())


def _check_replaceable(out: Path, force: bool) -> None:
    compiled = out.is_dir() and not out.is_symlink() and (out / _MARK).is_file()
    if not force:
        hint = "`--force` replaces it" if compiled else "choose another name"
        raise InputRefused(Diagnostic("I142", f"OUT `{out}` exists already", hint=hint))
    if not compiled:
        message = (
            f"OUT `{out}` exists and is not a compiled model; `--force` replaces only a folder that holds `{_MARK}`"
        )
        raise InputRefused(Diagnostic("I142", message, hint="choose another name"))


def _check_place(parent: Path) -> None:
    while not os.path.lexists(parent):
        parent = parent.parent
    if not parent.is_dir():
        raise InputRefused(
            Diagnostic("I143", f"OUT cannot be made in `{parent}`, which is not a folder", hint="choose another place")
        )
    try:
        with folder_beside(parent / "ktc"):  # the file system may refuse despite permissions
            pass
    except OSError as error:
        hint = "" if is_machine_fault(error) else "choose another place, or make this one writable"
        raise failed(error, "I143", f"OUT cannot be made in `{parent}`", hint=hint) from error


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

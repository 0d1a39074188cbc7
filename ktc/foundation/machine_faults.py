"""Faults of the machine, distinguished from bugs and faulty input: full disks, failing devices, no descriptors.

In: an exception of Python, torch, safetensors, tokenizers or sqlite. Out: a `MachineFault` with the code, the words of
the system and the remedy, or None. Libraries that write from C++ and Rust report an error of the system only in their
message.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ktc.diagnostics import Diagnostic, HostLacks, InputRefused, KtcError, causes
from ktc.foundation.regular_files import PathRefused

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DEVICE: Final = (errno.EIO, errno.EROFS, errno.ESTALE, errno.ENXIO, errno.ENODEV, errno.EREMOTEIO, errno.ENOTCONN)
_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE)
_VANISHED: Final = (errno.ENOENT,)  # writers make the folders they need, so one was removed meanwhile
_CODES: Final[Mapping[int, str]] = {
    **dict.fromkeys(_FULL, "U110"),
    **dict.fromkeys(_DEVICE, "U111"),
    **dict.fromkeys(_DESCRIPTORS, "U112"),
    **dict.fromkeys(_VANISHED, "U113"),
}
_REMEDIES: Final[Mapping[str, str]] = {
    "U110": "free some space and run it again",
    "U111": "see whether the disk is full (`df -h`) and what the system's log says (`dmesg`), then run it again",
    "U112": "raise the limit (`ulimit -n`) or end other programs, then run it again",
    "U113": "a file or folder was removed meanwhile: restore its place, then run it again",
    "U114": "make sure that it exists and may be used, then run it again",
}
_GONE: Final = "U113"
_OTHER: Final = "U114"
_NUMBER: Final = re.compile(r"(?:os error |\[Errno )(\d+)")  # of Rust, and of a Python error inside another's text
_CUT_SHORT: Final = re.compile(  # of torch and numpy, which do not pass on the error of the system
    r"inline_container|PytorchStreamWriter|iostream error|unexpected pos \d+ vs \d+|\d+ requested and \d+ written"
)
_SQLITE: Final[Mapping[str, int]] = {
    "database or disk is full": errno.ENOSPC,
    "disk I/O error": errno.EIO,
    "readonly database": errno.EROFS,
}


@dataclass(frozen=True, slots=True)
class MachineFault:
    """A fault of the machine: the code of its kind, the words of the system, and the path that it named, if any."""

    code: str
    words: str
    path: str | None

    @property
    def remedy(self) -> str:
        """The next action of the user."""
        return _REMEDIES[self.code]


def fault_in(error: BaseException) -> MachineFault | None:
    """Return the fault of the machine that raised `error`, or None: the input or ktc is at fault."""
    for cause in causes(error, (RuntimeError, KtcError)):  # torch's writer raises again, and so do refusals
        if isinstance(cause, KtcError):
            continue  # its text is ours
        fault = _of_system(cause) if isinstance(cause, OSError) else fault_in_text(str(cause))
        if fault is not None:
            return fault
        if isinstance(cause, RuntimeError | OSError) and _CUT_SHORT.search(str(cause)):
            return not_written_whole()
    return None


def not_written_whole() -> MachineFault:
    """Return the fault of a library or compiler that reports an unfinished file without the error of the system."""
    return MachineFault("U111", "a file could not be written whole", None)


def is_machine_fault(error: BaseException, *, vanished: bool = True) -> bool:
    """Return whether the machine is at fault, and not a path that cannot be used; `vanished`: also if it is missing."""
    fault = fault_in(error)
    return fault is not None and fault.code not in (_OTHER, *([] if vanished else [_GONE]))


def fault_in_text(text: str) -> MachineFault | None:
    """Return the fault that a message of a library or of a compiler names."""
    numbers = [int(digits) for digits in _NUMBER.findall(text)]
    numbers += [number for number in _CODES if number not in _VANISHED and os.strerror(number) in text]
    numbers += [number for words, number in _SQLITE.items() if words in text]
    known = next((number for number in numbers if number in _CODES), None)
    return None if known is None else MachineFault(_CODES[known], os.strerror(known), None)


def failed(error: BaseException, code: str, message: str, *, hint: str = "", safe: str = "") -> KtcError:
    """Return the error to raise where something could not be written: HostLacks if the machine is at fault.

    The words of the system follow `message`. `hint` replaces the remedy of the fault; `safe` says what was not lost.
    """
    fault = fault_in(error)
    words = fault.words if fault else (isinstance(error, OSError) and error.strerror) or str(error)
    remedy = hint or (fault.remedy if fault else "")
    diagnostic = Diagnostic(code, f"{message}: {words}", hint="; ".join(filter(None, (remedy, safe))))
    return HostLacks(diagnostic) if is_machine_fault(error) else InputRefused(diagnostic)


def diagnosed(fault: MachineFault) -> Diagnostic:
    """Return the message for a fault that no writer reported: files that were finished before are whole."""
    where = f"`{fault.path}`: " if fault.path else ""
    hint = f"{fault.remedy}; what ktc finished before is whole, and nothing half-written has a final name"
    return Diagnostic(fault.code, f"the file system failed: {where}{fault.words}", hint=hint)


def _of_system(error: OSError) -> MachineFault | None:
    not_of_files = ConnectionError | BrokenPipeError | TimeoutError | BlockingIOError | ChildProcessError
    if isinstance(error, not_of_files | PathRefused):
        return None
    if error.errno is None:
        return fault_in_text(str(error))  # `shutil.Error` holds the errors of many files as text
    named = error.filename2 or error.filename
    code = _CODES.get(error.errno, _OTHER)
    if code == _OTHER and named is None:
        return None
    words = error.strerror or os.strerror(error.errno)
    return MachineFault(code, words, None if named is None else os.fsdecode(named))

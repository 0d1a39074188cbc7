"""Text that a user wrote: read as UTF-8, or refused with the line of the fault.

In: a path, and the codes of its reader's refusals. Out: the text without a byte order mark. The first of many faults
are reported, and the number of the others.
"""

from __future__ import annotations

import errno
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Final

from ktc.diagnostics import Diagnostic, InputRefused, Span, listing
from ktc.foundation.regular_files import MOST_BYTES, PathRefused, open_regular, read_regular

MOST_FAULTS: Final = 20
_LONGEST_LINE: Final = 256 << 20  # bytes


def read_text(path: Path, *, unreadable: str, not_utf8: str, most_bytes: int = MOST_BYTES) -> str:
    """Return the text in `path`. Raises InputRefused: `unreadable` (also for too large a file) or `not_utf8`."""
    try:
        return read_regular(path, most_bytes).decode("utf-8-sig")
    except OSError as error:
        raise InputRefused(Diagnostic(unreadable, f"cannot read `{path}`: {error.strerror}")) from error
    except UnicodeDecodeError as error:
        line = bytes(error.object).count(b"\n", 0, error.start) + 1
        raise _not_utf8(path, not_utf8, line, error.start) from error


def read_lines(path: Path, *, unreadable: str, not_utf8: str) -> Generator[str]:
    """Yield the lines of a text with their ends, one by one, so that a file may be larger than the memory.

    Raises InputRefused: `unreadable` or `not_utf8`.
    """
    before = 0
    try:
        with open_regular(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE + 1), b""), start=1):
                if len(line) > _LONGEST_LINE:
                    raise PathRefused(errno.EFBIG, f"line {number} has more than {_LONGEST_LINE} bytes", str(path))
                try:
                    yield line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise _not_utf8(path, not_utf8, number, before + error.start) from error
                before += len(line)
    except OSError as error:
        raise InputRefused(Diagnostic(unreadable, f"cannot read `{path}`: {error.strerror}")) from error


def _not_utf8(path: Path, code: str, line: int, byte: int) -> InputRefused:
    hint = "write it again as UTF-8, for example with `iconv -t UTF-8`"
    place = Span(str(path), line, 1, line, 2)
    return InputRefused(Diagnostic(code, f"`{path}` is not UTF-8 (byte {byte})", place, hint=hint))


def bounded(faults: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """Return the first faults in order of files and lines, and a note with the number and the codes of the others."""
    ordered = sorted(faults, key=lambda fault: (fault.span.file, fault.span.line) if fault.span else ("", 0))
    more = ordered[MOST_FAULTS:]
    if not more:
        return tuple(ordered)
    codes = listing(sorted({fault.code for fault in more}))
    return (
        *ordered[:MOST_FAULTS],
        Diagnostic(ordered[0].code, f"{len(more)} more rows are refused ({codes})", severity="note"),
    )

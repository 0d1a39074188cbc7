"""Text that a user wrote: read as UTF-8, or refused with the line of the fault.

In: a path, and the codes of its reader's refusals. Out: the text without a byte order mark. The first of many faults
are reported, and the number of the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from ktc.diagnostics import Diagnostic, InputRefused, Span, listing
from ktc.foundation.regular_files import MOST_BYTES, read_regular

MOST_FAULTS: Final = 20


def read_text(path: Path, *, unreadable: str, not_utf8: str, most_bytes: int = MOST_BYTES) -> str:
    """Return the text in `path`. Raises InputRefused: `unreadable` (also for too large a file) or `not_utf8`."""
    try:
        return read_regular(path, most_bytes).decode("utf-8-sig")
    except OSError as error:
        raise InputRefused(Diagnostic(unreadable, f"cannot read `{path}`: {error.strerror}")) from error
    except UnicodeDecodeError as error:
        line = bytes(error.object).count(b"\n", 0, error.start) + 1
        hint = "write it again as UTF-8, for example with `iconv -t UTF-8`"
        message, place = f"`{path}` is not UTF-8 (byte {error.start})", Span(str(path), line, 1, line, 2)
        raise InputRefused(Diagnostic(not_utf8, message, place, hint=hint)) from error


def bounded(faults: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """Return the first faults in order of their lines, and a note with the number and the codes of the others."""
    ordered = sorted(faults, key=lambda fault: fault.span.line if fault.span else 0)
    more = ordered[MOST_FAULTS:]
    if not more:
        return tuple(ordered)
    codes = listing(sorted({fault.code for fault in more}))
    return (
        *ordered[:MOST_FAULTS],
        Diagnostic(ordered[0].code, f"{len(more)} more rows are refused ({codes})", severity="note"),
    )

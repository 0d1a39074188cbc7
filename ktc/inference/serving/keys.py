"""Keys of clients: read from a file that only its owner may read, kept as a hash, compared in constant time.

Refused: a file that cannot be read, that others may read, or that holds no key; the caller names the code.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import Final

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.regular_files import read_regular

_SHORTEST: Final = 16
_LARGEST_FILE: Final = 4096


def read_key(path: Path, code: str, hint: str) -> bytes:
    """Return the SHA-256 of the key in a file. Raises InputRefused (`code`)."""
    try:
        mode, key = path.stat().st_mode, read_regular(path, _LARGEST_FILE)
    except OSError as error:
        message = f"`{path}` cannot be read: {error.strerror}"
        raise InputRefused(Diagnostic(code, message, hint=hint)) from error
    if mode & 0o077:
        raise InputRefused(Diagnostic(code, f"other users may read the key in `{path}`", hint=hint))
    key = key.strip()
    if len(key) < _SHORTEST or not key.isascii() or any(byte <= 32 for byte in key):
        message = f"`{path}` does not hold a key of {_SHORTEST} or more ASCII characters without spaces"
        raise InputRefused(Diagnostic(code, message, hint=hint))
    return hashlib.sha256(key).digest()


def admits(header: str, key_sha256: bytes) -> bool:
    """Return whether an `Authorization` header has the key of this hash."""
    scheme, _, key = header.partition(" ")
    digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
    return hmac.compare_digest(digest, key_sha256) and scheme.lower() == "bearer"

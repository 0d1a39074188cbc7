"""One file of a packed store: the experts of one layer in their kernel's form, behind a header, ready to be mapped.

A file is a magic number, the length of a JSON header, the header and its sha256, a hole, and from 2 MiB on the packed
bytes as they are in memory. It is written beside its target, flushed and renamed: a name means a complete file.
Refused (`Damaged`): another magic number or schema, a header that differs from its digest, a file of another size.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

from ktc.foundation.decode import Undecodable, decode, read_json, schema_fault
from ktc.foundation.files import replaced_file
from ktc.foundation.regular_files import open_descriptor, open_regular

SCHEMA: Final = 2
DATA: Final = 2 << 20  # the packed bytes begin on a huge page, in the file as in memory
PIECE: Final = 32 << 20  # read, written and hashed at once
_MAGIC: Final = b"KTCPACK\n"
_LENGTH: Final = 4
_LARGEST_HEADER: Final = 1 << 16


class Damaged(Exception):
    """The file is not a complete packed file; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The sources of packed bytes as digests; `kernel` has its build, the sizes and the versions of packages."""

    kernel: str
    rows: str
    checkpoint: str


@dataclass(frozen=True, slots=True)
class Header:
    """`content` is the digest of the packed bytes: see `content_digest`."""

    schema: int
    fqn: str
    kernel: str
    num_experts: int
    packed_bytes: int
    origin: Origin
    content: str


def content_digest(digests: Iterable[bytes]) -> str:
    """Return the digest of packed bytes from the sha256 of each `PIECE`: pieces can be hashed in parallel."""
    whole = hashlib.sha256()
    for digest in digests:
        whole.update(digest)
    return whole.hexdigest()


def digest_of(data: memoryview) -> str:
    """Return the content digest of bytes in memory."""
    with ThreadPoolExecutor(_workers()) as pool:
        return content_digest(pool.map(_sha256, _pieces(data)))


def write(path: Path, make_header: Callable[[str], Header], data: memoryview, wrote: Callable[[int], None]) -> Header:
    """Write a complete file, with the header that `make_header` makes of the content digest.

    `wrote` receives the bytes of each piece. Raise `OSError`; after any error no file is left at `path` or beside.
    """
    with (
        replaced_file(path) as beside,
        beside.open("wb", buffering=0) as file,
        ThreadPoolExecutor(1) as pool,
    ):
        descriptor = file.fileno()
        _reserve(descriptor, len(data))
        digests: list[bytes] = []
        position = DATA
        for piece in _pieces(data):
            hashed = pool.submit(_sha256, piece)  # beside the write: neither holds the interpreter
            _write_all(descriptor, piece, position)
            digests.append(hashed.result())
            position += len(piece)
            wrote(len(piece))
        header = make_header(content_digest(digests))
        _write_all(descriptor, memoryview(_encoded(header)), 0)
    return header


def read_header(path: Path) -> Header:
    """Return the header of a complete file. Raise `Damaged` or `OSError`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if file.read(len(_MAGIC)) != _MAGIC:
            raise Damaged("it does not begin as a packed file does")
        length = int.from_bytes(file.read(_LENGTH), "little")
        if length > _LARGEST_HEADER:
            raise Damaged(f"it claims a header of {length} bytes")
        text, digest = file.read(length), file.read(hashlib.sha256().digest_size)
    if hashlib.sha256(text).digest() != digest:
        raise Damaged("its header was altered")
    header = _decoded(text)
    if size != DATA + header.packed_bytes:
        raise Damaged(f"it has {size} bytes, expected {DATA + header.packed_bytes}")
    return header


def read_into(descriptor: int, target: memoryview, offset: int) -> int:
    """Fill `target` with packed bytes from `offset` on and return their number. Raises `Damaged` where they end."""
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], DATA + offset + done)
        if count == 0:
            raise Damaged("it was truncated")
        done += count
    return done


def map_read_only(path: Path, size: int) -> mmap.mmap:
    """Map the packed bytes shared and read-only; processes that map the same file share them."""
    with open_regular(path) as file:
        return mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=DATA)


def stored_digest(path: Path, size: int, hashed: Callable[[int], None]) -> str:
    """Return the content digest of the packed bytes in a file, read without a mapping."""

    def piece(offset: int) -> bytes:
        target = memoryview(bytearray(min(PIECE, size - offset)))
        read_into(descriptor, target, offset)
        return _sha256(target)

    digests: list[bytes] = []
    descriptor = open_descriptor(path)
    try:
        with ThreadPoolExecutor(_workers()) as pool:
            for offset, digest in zip(offsets(size), pool.map(piece, offsets(size)), strict=True):
                digests.append(digest)
                hashed(min(PIECE, size - offset))
    finally:
        os.close(descriptor)
    return content_digest(digests)


def offsets(size: int) -> range:
    """Return the offsets of the pieces of `size` packed bytes."""
    return range(0, size, PIECE)


def _pieces(data: memoryview) -> Iterable[memoryview]:
    return (data[offset : offset + PIECE] for offset in offsets(len(data)))


def _sha256(data: memoryview) -> bytes:
    return hashlib.sha256(data).digest()


def _workers() -> int:
    return min(8, os.cpu_count() or 1)


def _reserve(descriptor: int, size: int) -> None:
    """Take the space now, so that a full disk is reported before minutes of packing. The hole takes no space."""
    try:
        os.posix_fallocate(descriptor, DATA, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):  # the file system cannot reserve
            raise
        os.ftruncate(descriptor, DATA + size)


def _write_all(descriptor: int, data: memoryview, position: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], position + done)


def _encoded(header: Header) -> bytes:
    text = json.dumps(asdict(header)).encode()
    assert len(text) < _LARGEST_HEADER, "a header is a few hundred bytes"
    return _MAGIC + len(text).to_bytes(_LENGTH, "little") + text + hashlib.sha256(text).digest()


def _decoded(text: bytes) -> Header:
    try:
        content: Any = read_json(text)
        schema = cast("dict[str, Any]", content).get("schema") if isinstance(content, dict) else None
        if fault := schema_fault(schema, SCHEMA):
            raise Damaged(f"it {fault}")
        header = decode(content, Header)
    except (ValueError, Undecodable) as error:
        raise Damaged(f"its header cannot be read: {error}") from error
    if header.packed_bytes < 1:
        raise Damaged(f"it claims {header.packed_bytes} packed bytes")
    return header

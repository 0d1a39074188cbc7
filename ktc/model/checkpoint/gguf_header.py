"""The header of one GGUF file: input is a path, output its settings and its tensors with their byte ranges.

The header is untrusted: a count, length, type, shape or offset that does not fit the file is an error that names the
file and the position. Sizes are integers of any length, compared before anything is read or allocated. Time and memory
are bounded by `MAX_HEADER_BYTES`. The data is not read.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NoReturn

from ktc.diagnostics import Diagnostic
from ktc.foundation.regular_files import open_regular
from ktc.model.checkpoint.gguf_types import TYPE_NAMES, block_of
from ktc.model.checkpoint.header import MAX_HEADER_BYTES, HeaderRefused, TensorEntry

Setting = int | float | bool | str

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_SMALLEST_SETTING, _SMALLEST_TENSOR = 14, 33  # bytes of a setting of one byte, and of a tensor of one dimension
_MOST_SETTINGS, _MOST_TENSORS = 1 << 16, 1 << 20
_LONGEST_KEY, _LONGEST_NAME, _LONGEST_KEPT = 65535, 63, 1024
_ALIGNMENT: Final = 32
_QUANTISATION_VERSION: Final = 2
# Value types by number, with their `struct` formats. 8 is a string, 9 an array.
_NUMBERS: Final[Mapping[int, str]] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_BOOL, _STRING, _ARRAY, _UINT32 = 7, 8, 9, 4


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The contents of one header. `settings` has numbers and short strings; arrays and long strings are skipped."""

    settings: Mapping[str, Setting]
    tensors: tuple[TensorEntry, ...]


def read_gguf_header(path: Path) -> GgufHeader:
    """Return the header of the file at `path`, tensors in order of their bytes.

    Raises `HeaderRefused` or `OSError`.
    """
    with open_regular(path) as file:
        cursor = _Cursor(file, path.name, os.fstat(file.fileno()).st_size)
        tensors, settings = _counts(cursor)
        found, alignment = _settings(cursor, settings)
        described = [_tensor(cursor, alignment) for _ in range(tensors)]
    begin = -(-cursor.place // alignment) * alignment
    return GgufHeader(found, _placed(cursor, described, begin, alignment))


class _Cursor:
    """Read sequentially, never beyond the end of the file or the largest header."""

    def __init__(self, file: BinaryIO, name: str, size: int) -> None:
        self._file, self.name, self.size, self.place = file, name, size, 0

    def refuse(self, what: str) -> NoReturn:
        hint = f"download or copy `{self.name}` again"
        raise HeaderRefused([Diagnostic("I112", f"`{self.name}` {what}", hint=hint)])

    def _check(self, count: int) -> None:
        if count > self.size - self.place:
            self.refuse(f"is truncated: {count} bytes are needed from byte {self.place} on, it has {self.size} in all")
        if self.place + count > MAX_HEADER_BYTES:
            self.refuse(f"claims a header of more than {MAX_HEADER_BYTES} bytes")

    def take(self, count: int) -> bytes:
        self._check(count)
        found = self._file.read(count)
        if len(found) < count:
            self.refuse("was cut short while it was read")
        self.place += count
        return found

    def skip(self, count: int) -> None:
        self._check(count)
        self._file.seek(count, 1)
        self.place += count

    def number(self, code: str) -> int | float:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def whole(self, code: str) -> int:
        return int(self.number(code))

    def text(self, longest: int, what: str) -> bytes:
        place, length = self.place, self.whole("Q")
        if length > longest:
            self.refuse(f"has {what} of {length} bytes at byte {place}, at most {longest} are allowed")
        return self.take(length)


def _counts(cursor: _Cursor) -> tuple[int, int]:
    """Return the numbers of tensors and settings."""
    if cursor.size < 24 or cursor.take(4) != _MAGIC:
        cursor.refuse("is not a GGUF file: it does not begin with `GGUF` and a header of 24 bytes")
    version = cursor.whole("I")
    if version & 0xFFFF == 0 and version:
        cursor.refuse("is a big-endian GGUF file, which ktc does not read")
    if version not in _VERSIONS:
        cursor.refuse(f"is GGUF of version {version}; ktc reads {' and '.join(map(str, _VERSIONS))}")
    tensors, settings = cursor.whole("Q"), cursor.whole("Q")
    rest = cursor.size - cursor.place
    for count, most, smallest, what in (
        (tensors, _MOST_TENSORS, _SMALLEST_TENSOR, "tensors"),
        (settings, _MOST_SETTINGS, _SMALLEST_SETTING, "settings"),
    ):
        if count > min(most, rest // smallest):
            cursor.refuse(f"claims {count} {what}, which its {cursor.size} bytes cannot hold")
    return tensors, settings


def _settings(cursor: _Cursor, count: int) -> tuple[dict[str, Setting], int]:
    """Return the settings, and the alignment of tensors among them."""
    kept: dict[str, Setting] = {}
    seen: set[str] = set()
    alignment = _ALIGNMENT
    for _ in range(count):
        place = cursor.place
        raw = cursor.text(_LONGEST_KEY, "a setting's name")
        if not raw or not raw.isascii() or not raw.decode("ascii").isprintable():
            cursor.refuse(f"has a setting with no readable name at byte {place}")
        key = raw.decode("ascii")
        if key in seen:
            cursor.refuse(f"has the setting `{key:.80}` twice")
        seen.add(key)
        kind = cursor.whole("I")
        value = _value(cursor, key, kind)
        if value is not None:
            kept[key] = value
        if key == "general.alignment":
            alignment = _checked_alignment(cursor, kind, value)
    version = kept.get("general.quantization_version", _QUANTISATION_VERSION)
    if version != _QUANTISATION_VERSION:
        cursor.refuse(f"is quantised by version {version!s:.40} of ggml's formats; ktc reads {_QUANTISATION_VERSION}")
    return kept, alignment


def _value(cursor: _Cursor, key: str, kind: int) -> Setting | None:
    """Return the value of a setting, `None` for one that is not kept."""
    place = cursor.place
    if kind == _ARRAY:
        _skip_array(cursor, key)
        return None
    if kind == _STRING:
        raw = cursor.text(MAX_HEADER_BYTES, f"a text in `{key:.80}`")
        try:
            return raw.decode() if len(raw) <= _LONGEST_KEPT else None
        except UnicodeDecodeError:
            cursor.refuse(f"has a text in `{key:.80}` at byte {place} that is not UTF-8")
    if kind not in _NUMBERS:
        cursor.refuse(f"gives `{key:.80}` a value of unknown type {kind} at byte {place}")
    number = cursor.number(_NUMBERS[kind])
    if kind != _BOOL:
        return number
    if number > 1:
        cursor.refuse(f"gives `{key:.80}` a boolean value of {number} at byte {place}")
    return bool(number)


def _skip_array(cursor: _Cursor, key: str) -> None:
    place, kind, length = cursor.place, cursor.whole("I"), cursor.whole("Q")
    if kind == _STRING:
        if length > (cursor.size - cursor.place) // 8:
            cursor.refuse(f"claims {length} texts in `{key:.80}` at byte {place}, which it cannot hold")
        for _ in range(length):
            cursor.skip(cursor.whole("Q"))
    elif kind in _NUMBERS:
        cursor.skip(length * struct.calcsize(_NUMBERS[kind]))
    else:
        cursor.refuse(f"has an array of unknown type {kind} in `{key:.80}` at byte {place}")


def _checked_alignment(cursor: _Cursor, kind: int, value: Setting | None) -> int:
    if kind != _UINT32 or not isinstance(value, int) or not 8 <= value <= 1 << 16 or value & (value - 1):
        cursor.refuse(f"has an alignment of {value!s:.40}, expected a power of two from 8 to 65536")
    return value


@dataclass(frozen=True, slots=True)
class _Described:
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


def _tensor(cursor: _Cursor, alignment: int) -> _Described:
    place = cursor.place
    raw = cursor.text(_LONGEST_NAME, "a tensor's name")
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        cursor.refuse(f"has a tensor whose name is not UTF-8 at byte {place}")
    if not name or not name.isprintable():
        cursor.refuse(f"has a tensor with no readable name at byte {place}")
    dims = cursor.whole("I")
    if not 1 <= dims <= 4:
        cursor.refuse(f"gives tensor `{name}` {dims} dimensions, expected 1 to 4")
    sizes = struct.unpack(f"<{dims}Q", cursor.take(8 * dims))
    number, offset = cursor.whole("I"), cursor.whole("Q")
    dtype = TYPE_NAMES.get(number)
    if dtype is None:
        cursor.refuse(f"gives tensor `{name}` the unknown type {number}")
    block = block_of(dtype)
    if min(sizes) < 1 or math.prod(sizes) >= 1 << 62 or sizes[0] % block.weights:
        rows = f" in blocks of {block.weights}" if block.weights > 1 else ""
        cursor.refuse(f"gives tensor `{name}` the sizes {list(sizes)}, which no tensor of {dtype}{rows} has")
    if offset % alignment:
        cursor.refuse(f"puts tensor `{name}` at {offset}, which is not a multiple of the alignment {alignment}")
    return _Described(
        name, dtype, tuple(reversed(sizes)), offset, math.prod(sizes) // block.weights * block.bytes
    )  # fmt: skip


def _placed(cursor: _Cursor, described: Sequence[_Described], begin: int, alignment: int) -> tuple[TensorEntry, ...]:
    """Return the entries in order of their bytes: contiguous except for alignment, and inside the file."""
    seen: set[str] = set()
    position = 0
    entries: list[TensorEntry] = []
    for tensor in sorted(described, key=lambda tensor: tensor.offset):
        if tensor.name in seen:
            cursor.refuse(f"has tensor `{tensor.name}` twice")
        seen.add(tensor.name)
        if tensor.offset != position:
            relation = "overlaps the tensor before it" if tensor.offset < position else "leaves a hole before it"
            cursor.refuse(f"has a broken layout: tensor `{tensor.name}` at {tensor.offset} {relation}")
        first, end = begin + tensor.offset, begin + tensor.offset + tensor.bytes
        if end > cursor.size:
            cursor.refuse(f"is truncated: tensor `{tensor.name}` ends at byte {end}, the file has {cursor.size}")
        entries.append(TensorEntry(tensor.name, cursor.name, tensor.dtype, tensor.shape, first, end))
        position = -(-(tensor.offset + tensor.bytes) // alignment) * alignment
    return tuple(entries)

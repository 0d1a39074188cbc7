"""The header of one safetensors file: input is a path, output its tensors with their byte ranges.

The header is untrusted: a length, shape or offset that does not fit the file is an error that names the file and the
tensor. The data is not read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ktc.diagnostics import Diagnostic
from ktc.foundation.decode import read_json
from ktc.foundation.regular_files import open_regular

MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
_LENGTH_BYTES = 8
_DTYPES = {
    "BF16": "bf16",
    "F16": "f16",
    "F32": "f32",
    "F64": "f64",
    "F8_E4M3": "fp8",
    "F8_E5M2": "fp8_e5m2",
    "F8_E8M0": "e8m0",
    "I64": "i64",
    "I32": "i32",
    "I16": "i16",
    "I8": "i8",
    "U8": "u8",
    "BOOL": "bool",
}
STORED_DTYPES = {name: stored for stored, name in _DTYPES.items()}
"""The dtypes by their names in safetensors files."""
ITEM_SIZE = {
    **dict.fromkeys(("f64", "i64"), 8),
    **dict.fromkeys(("f32", "i32"), 4),
    **dict.fromkeys(("bf16", "f16", "i16"), 2),
    **dict.fromkeys(("fp8", "fp8_e5m2", "e8m0", "i8", "u8", "bool"), 1),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint. `begin` and `end` count bytes from the start of the file; rows are contiguous."""

    name: str
    file: str
    dtype: str  # "bf16", "f32", ...: a key of ITEM_SIZE
    shape: tuple[int, ...]
    begin: int
    end: int


class HeaderRefused(Exception):
    """The file is not a complete safetensors file. Carries the problems, for the report on all files together."""

    def __init__(self, diagnostics: Sequence[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        super().__init__(self.diagnostics[0].message)


def read_header(path: Path) -> tuple[TensorEntry, ...]:
    """Return the tensors of the file at `path`, in order of their bytes. Raises `HeaderRefused` or `OSError`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(_LENGTH_BYTES)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < _LENGTH_BYTES:
            raise _refused(path, f"has {size} bytes; a safetensors file begins with an 8-byte header length")
        if length > MAX_HEADER_BYTES:
            raise _refused(path, f"claims a header of {length} bytes; at most {MAX_HEADER_BYTES} are allowed")
        if length > size - _LENGTH_BYTES:
            raise _refused(
                path, f"is truncated: its header needs {length} bytes, the file holds {size - _LENGTH_BYTES} more"
            )
        text = file.read(length)
    entries = _entries(path, _parse(path, text), _LENGTH_BYTES + length)
    _check_layout(path, entries, _LENGTH_BYTES + length, size)
    return entries


def _refused(path: Path, what: str) -> HeaderRefused:
    return HeaderRefused([_diagnostic(path, what)])


def _diagnostic(path: Path, what: str) -> Diagnostic:
    return Diagnostic("I112", f"`{path.name}` {what}", hint=f"download or copy `{path.name}` again")


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        members: dict[str, Any] = {}
        for key, value in pairs:
            if key in members:
                raise ValueError(f"`{key}` appears twice")
            members[key] = value
        return members

    try:
        header = read_json(text, unique)
    except ValueError as error:
        raise _refused(path, f"has a header that is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise _refused(path, "has a header that is not a JSON object")
    header = cast("dict[str, Any]", header)
    header.pop("__metadata__", None)
    return header


def _entries(path: Path, header: dict[str, Any], data_begin: int) -> tuple[TensorEntry, ...]:
    problems: list[Diagnostic] = []
    entries: list[TensorEntry] = []
    for name, description in header.items():
        try:
            entries.append(_entry(path, name, description, data_begin))
        except ValueError as error:
            problems.append(_diagnostic(path, f"describes tensor `{name:.500}` wrongly: {error}"))
    if problems:
        raise HeaderRefused(problems)
    return tuple(sorted(entries, key=lambda entry: (entry.begin, entry.end)))


def _entry(path: Path, name: str, description: object, data_begin: int) -> TensorEntry:
    if not isinstance(description, dict):
        raise ValueError("expected an object with dtype, shape and data_offsets")
    fields = cast("dict[str, Any]", description)
    dtype = _DTYPES.get(str(fields.get("dtype")))
    if dtype is None:
        raise ValueError(f"dtype `{fields.get('dtype')!s:.40}` is not one of {', '.join(_DTYPES)}")
    shape = _whole_numbers(fields.get("shape"), "shape")
    offsets = _whole_numbers(fields.get("data_offsets"), "data_offsets")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"data_offsets {list(offsets)!s:.200} are not a range")
    needed = math.prod(shape) * ITEM_SIZE[dtype]
    if offsets[1] - offsets[0] != needed:
        raise ValueError(
            f"shape {list(shape)!s:.200} of {dtype} needs {needed} bytes, data_offsets span {offsets[1] - offsets[0]}"
        )
    return TensorEntry(name, path.name, dtype, shape, data_begin + offsets[0], data_begin + offsets[1])


def _whole_numbers(value: object, what: str) -> tuple[int, ...]:
    numbers = cast("list[object]", value) if isinstance(value, list) else [None]
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
        raise ValueError(f"`{what}` must be a list of integers, found {value!s:.80}")
    return tuple(cast("list[int]", numbers))


def _check_layout(path: Path, entries: Sequence[TensorEntry], data_begin: int, size: int) -> None:
    """Check that the tensors are contiguous, without overlap or hole, and end at the end of the file."""
    position = data_begin
    for entry in entries:
        if entry.end > size:
            raise _refused(path, f"is truncated: tensor `{entry.name}` ends at byte {entry.end}, the file has {size}")
        if entry.begin != position:
            relation = "overlaps the tensor before it" if entry.begin < position else "leaves a hole before it"
            raise _refused(
                path, f"has a broken layout: tensor `{entry.name}` begins at byte {entry.begin} and {relation}"
            )
        position = entry.end
    if position != size:
        raise _refused(path, f"is {size - position} bytes longer than its tensors")

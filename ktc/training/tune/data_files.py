"""The rows of one data file: JSON, JSON lines, CSV, Parquet or plain text.

In: a path. Out: the number and the value of each row, or a `RowFault` instead of the value. The number is the line
where the row begins, in Parquet that of the row, from 1. Refused: an unknown ending or an unreadable file (T510), not
UTF-8 (T512). A row that is not JSON or CSV is a fault (T513), and the last one of a file that cannot be read further.
"""

from __future__ import annotations

import codecs
import csv
import json
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

from ktc.diagnostics import Diagnostic, InputRefused, listing, suggest
from ktc.foundation.regular_files import open_regular
from ktc.foundation.text_files import read_lines, read_text
from ktc.training.tune.bundled import names
from ktc.training.tune.packages import require_packages

Rows = Iterator[tuple[int, Any]]

_MOST_BYTES: Final = 4 << 30  # of a file that is parsed in memory: a JSON list, and text
_HEAD: Final = 1 << 16  # bytes that are read to know whether a file has lines
_BATCH: Final = 256  # rows of Parquet that are decoded together
_JSON_COLUMNS: Final = frozenset({"messages", "conversations", "history", "tools"})
_TRUTH: Final[Mapping[str, bool]] = {"true": True, "false": False, "1": True, "0": False}


class RowFault(Exception):
    """The fault of one row: code, message and hint."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code, self.message, self.hint = code, message, hint


def read_rows(path: Path) -> Rows:
    """Yield the number and the value of each row; the value is a `RowFault` where a row is invalid.

    Raises:
        InputRefused: T510 or T512.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        hint = suggest(path.name, names()) or f"data that ktc ships: {listing(names())}"
        raise InputRefused(Diagnostic("T510", f"`{path}` ends in none of {listing(ENDINGS)}", hint=hint))
    return reader(path)


# JSON ----------------------------------------------------------------------------------------------------------------
def _json(path: Path) -> Rows:
    """Yield one list's elements, or the objects of lines."""
    return _array(_whole(path)) if _begins_with(path, b"[") else _objects(path)


def _begins_with(path: Path, character: bytes) -> bool:
    """Return whether the first character that is not white space is this one."""
    try:
        with open_regular(path) as file:
            start = file.read(_HEAD).removeprefix(codecs.BOM_UTF8)
            while start.isspace():
                start = file.read(_HEAD)
    except OSError as error:
        raise InputRefused(Diagnostic("T510", f"cannot read `{path}`: {error.strerror}")) from error
    return start.lstrip().startswith(character)


def _objects(path: Path) -> Rows:
    for number, line in enumerate(_text_lines(path), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                yield number, _no_json(error)


def _array(text: str) -> Rows:
    """Yield the elements of one JSON list with their lines, up to the first invalid one."""
    decoder = json.JSONDecoder()
    position, line, seen = _skip(text, text.index("[") + 1), 1, 0
    while text[position : position + 1] != "]":
        line, seen = line + text.count("\n", seen, position), position
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            yield text.count("\n", 0, getattr(error, "pos", position)) + 1, _no_json(error)
            return
        yield line, value
        position = _skip(text, position)
        if text[position : position + 1] == ",":
            position = _skip(text, position + 1)
        elif text[position : position + 1] != "]":
            message = "this is not JSON: rows of a list are separated by commas, and it ends with `]`"
            yield text.count("\n", 0, position) + 1, RowFault("T513", message)
            return
    if text[position + 1 :].strip():
        fault = RowFault("T513", "this is not JSON: the list is followed by other text")
        yield text.count("\n", 0, position) + 1, fault


def _skip(text: str, position: int) -> int:
    while text[position : position + 1].isspace():
        position += 1
    return position


def _no_json(error: Exception) -> RowFault:
    said = "it is nested too deeply" if isinstance(error, RecursionError) else getattr(error, "msg", str(error))
    return RowFault("T513", f"this is not JSON: {said}", "a .jsonl file has one object a line, a .json file one list")


# Text ----------------------------------------------------------------------------------------------------------------
def _text_lines(path: Path) -> Generator[str]:
    return read_lines(path, unreadable="T510", not_utf8="T512")


def _whole(path: Path) -> str:
    return read_text(path, unreadable="T510", not_utf8="T512", most_bytes=_MOST_BYTES)


def _paragraphs(path: Path) -> Rows:
    """Yield the stretches between blank lines, each as a row."""
    paragraph = list[str]()
    for number, line in enumerate([*_whole(path).splitlines(), ""], start=1):
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield number - len(paragraph), {"text": "\n".join(paragraph)}
            paragraph = []


# Tables --------------------------------------------------------------------------------------------------------------
def _csv(path: Path) -> Rows:
    """Yield the rows of a table as objects; its first row has the names of the columns."""
    csv.field_size_limit(sys.maxsize)  # an answer may be longer than the 128 KiB of the default
    cells = csv.reader(_text_lines(path), delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
    columns = list[str]()
    while True:
        line = cells.line_num + 1
        try:
            row = next(cells)
        except StopIteration:
            return
        except csv.Error as error:
            yield line, RowFault("T513", f"this is not CSV: {error}", 'a quote within quotes is doubled: `""`')
            return
        if not row:
            continue
        if not columns:
            columns = [name.strip() for name in row]
            if fault := _fault_of_columns(columns):
                yield line, fault
                return
        elif len(row) != len(columns):
            message = f"the row has {len(row)} values, and the first line names {len(columns)} columns"
            yield line, RowFault("T513", message, "a value with commas or line breaks stands in double quotes")
        else:
            yield line, {name: _cell(name, value) for name, value in zip(columns, row, strict=True)}


def _fault_of_columns(columns: list[str]) -> RowFault | None:
    if repeated := next((name for name in columns if columns.count(name) > 1), None):
        return RowFault("T513", f"the first line names the column `{repeated}` twice")
    if len(columns) == 1 and ";" in columns[0]:
        return RowFault("T513", "the first line names one column, with `;`", "separate columns by commas")
    return None


def _cell(column: str, value: str) -> Any:
    """Return a cell as the value that JSON would have: lists of turns and of tools, and truth values of labels."""
    if column == "label":
        return _TRUTH.get(value.strip().lower(), value)
    if column in _JSON_COLUMNS and value.lstrip()[:1] == "[":
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value  # its format says that it is not a list
    return value


def _parquet(path: Path) -> Rows:
    require_packages("pyarrow")
    import pyarrow
    import pyarrow.parquet

    # Values that Python cannot have, such as text that is not UTF-8, are ValueError or OverflowError.
    refusals = cast("tuple[type[Exception], ...]", (cast("Any", pyarrow).ArrowException, ValueError, OverflowError))
    number = 0
    try:
        with open_regular(path) as file:
            for batch in cast("Any", pyarrow.parquet.ParquetFile(file)).iter_batches(batch_size=_BATCH):
                for row in _values(batch, refusals):
                    number += 1
                    yield number, without_nulls(row)
    except refusals as error:
        said = "a text is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error).partition("\n")[0]
        yield number + 1, RowFault("T513", f"this is not Parquet: {said:.200}")
    except OSError as error:
        raise InputRefused(Diagnostic("T510", f"cannot read `{path}`: {error.strerror or error}")) from error


def _values(batch: Any, refusals: tuple[type[Exception], ...]) -> Iterator[Any]:
    """Yield the rows; one that cannot be converted raises in its turn, not before those above it."""
    try:
        values = batch.to_pylist()
    except refusals:
        values = (batch.slice(place, 1).to_pylist()[0] for place in range(batch.num_rows))
    yield from values


def without_nulls(value: Any) -> Any:
    """Return the value without keys that are null: columns of structures give every row the keys of all rows."""
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {key: without_nulls(inner) for key, inner in fields.items() if inner is not None}
    return [without_nulls(inner) for inner in cast("list[Any]", value)] if isinstance(value, list) else value


_READERS: Final[Mapping[str, Callable[[Path], Rows]]] = {
    ".json": _json,
    ".jsonl": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
    ".txt": _paragraphs,
}
ENDINGS: Final = tuple(_READERS)

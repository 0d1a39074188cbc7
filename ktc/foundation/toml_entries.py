"""The tables of a TOML file, whose values are checked one by one, and all faults of the file with their places.

In: a path and the file's text. Out: an `Entries` for each table, which returns values that a function accepts.
Refused, all together: unknown keys and unusable values, under the codes of the caller.
"""

from __future__ import annotations

import re
import reprlib
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar, cast

from ktc.diagnostics import Diagnostic, InputRefused, Span, suggest
from ktc.foundation.regular_files import read_regular

T = TypeVar("T")
Keys = tuple[str | int, ...]  # from the root to an entry; numbers count the tables of an array
_HEADER: Final = re.compile(r"^[ \t]*(\[\[?)[ \t]*([^\]#\n]+?)[ \t]*\]", re.MULTILINE)
_KEY: Final = re.compile(r"""^[ \t]*((?:"[^"\n]*"|'[^'\n]*'|[\w.\- ]+?))[ \t]*=""", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class FaultCodes:
    """The codes of an unreadable file, of one that is not TOML, of an unknown key and of an unusable value."""

    unreadable: str
    not_toml: str
    key: str
    value: str


class TomlFile:
    """One file: its text, and the faults that were found in it so far."""

    def __init__(self, path: Path, shown: str, codes: FaultCodes) -> None:
        """Read the file. Raises `InputRefused` where it cannot be read, or is not TOML."""
        self._shown, self.codes = shown, codes
        self._faults: list[Diagnostic] = []
        try:
            self._text = read_regular(path).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise InputRefused(Diagnostic(codes.unreadable, f"cannot read the host file `{shown}`: {error}")) from error
        try:
            self.root = Entries(self, tomllib.loads(self._text), ())
        except (ValueError, RecursionError) as error:  # tomllib also raises on dates and numbers that cannot be
            words = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            fault = Diagnostic(codes.not_toml, f"the host file is not TOML: {words}", self._named_place(words))
            raise InputRefused(fault, sources={shown: self._text}) from error
        self._places = dict(_places(self._text))

    def fault(self, code: str, keys: Keys, message: str, hint: str = "") -> None:
        """Add a fault of the entry at `keys`."""
        self._faults.append(Diagnostic(code, message, self._span(keys), hint=hint))

    def raise_faults(self) -> None:
        """Raise `InputRefused` with all faults, if there are any."""
        if self._faults:
            raise InputRefused(*self._faults, sources={self._shown: self._text})

    def _span(self, keys: Keys) -> Span:
        """Return the place of the entry, or of the nearest entry around it that has one."""
        known = next((keys[:length] for length in range(len(keys), 0, -1) if keys[:length] in self._places), ())
        start, length = self._places.get(known, (0, 1))
        for key in keys[len(known) :]:  # inside an inline table
            inside = re.compile(rf"(?<![\w-])[\"']?{re.escape(str(key))}[\"']?(?=\s*=)").search(self._text, start)
            if inside is not None:
                start, length = inside.start(), len(inside[0])
        line = self._text.count("\n", 0, start) + 1
        column = start - (self._text.rfind("\n", 0, start) + 1) + 1
        return Span(self._shown, line, column, line, column + length)

    def _named_place(self, message: str) -> Span:
        """Return the place that a message of tomllib names; otherwise the last line."""
        named = re.search(r"at line (\d+), column (\d+)", message)
        line, column = (int(named[1]), int(named[2])) if named else (self._text.count("\n") + 1, 1)
        return Span(self._shown, line, column, line, column + 1)


@dataclass(frozen=True, slots=True)
class Entries:
    """One table of the file, at `keys`."""

    file: TomlFile
    table: Mapping[str, object]
    keys: Keys = field(default=())

    def __contains__(self, key: str) -> bool:
        return key in self.table

    def refuse_unknown(self, *known: str) -> None:
        """Add a fault for each key that is not among those."""
        for key in self.table:
            if key not in known:
                where = ".".join(str(part) for part in (*self.keys, key) if isinstance(part, str))
                message = f"unknown key `{where:.100}`: expected one of {', '.join(known)}"
                self.file.fault(self.file.codes.key, (*self.keys, key), message, suggest(key[:100], known))

    def value(self, key: str, convert: Callable[[object], T | None], what: str) -> T | None:
        """Return a converted value, None where it is missing. `convert` returns None for one that is not `what`."""
        if key not in self.table:
            return None
        value = convert(self.table[key])
        if value is None:
            self.refuse(key, f"`{key}` must be {what}, found `{reprlib.repr(self.table[key]):.100}`")
        return value

    def refuse(self, key: str, message: str) -> None:
        """Add a fault of the value at `key`."""
        self.file.fault(self.file.codes.value, (*self.keys, key), message)

    def inside(self, key: str) -> Entries:
        """Return the table at `key`, an empty one where it is missing or another value."""
        table = self.table.get(key, {})
        if not isinstance(table, dict):
            self.refuse(key, f"`{key}` must be a table, found `{reprlib.repr(table):.100}`")
        table = cast("dict[str, object]", table) if isinstance(table, dict) else dict[str, object]()
        return Entries(self.file, table, (*self.keys, key))

    def tables(self, key: str) -> list[Entries]:
        """Return the tables of the array at `key`, none where it is missing."""
        value = self.table.get(key, [])
        tables = cast("list[object]", value) if isinstance(value, list) else [None]
        if not all(isinstance(table, dict) for table in tables):
            self.refuse(key, f"`{key}` must be written as `[[{key}]]` tables")
            return []
        return [
            Entries(self.file, cast("dict[str, object]", table), (*self.keys, key, number))
            for number, table in enumerate(tables)
        ]


def _places(text: str) -> Iterator[tuple[Keys, tuple[int, int]]]:
    """Yield the keys of each line that has some, with the place and the length of the last."""
    table: Keys = ()
    counts = dict[Keys, int]()
    hits = [*_HEADER.finditer(text), *_KEY.finditer(text)]
    for hit in sorted(hits, key=lambda hit: hit.start()):
        if hit.re is _HEADER:
            table = tuple(_parts(hit[2]))
            if hit[1] == "[[":
                yield table, (hit.start(1), len(hit[0].strip()) + 1)
                number = counts[table] = counts.get(table, -1) + 1
                table = (*table, number)
            yield table, (hit.start(1), len(hit[0].strip()))
            continue
        keys = (*table, *_parts(hit[1]))
        yield keys, (hit.start(1), len(hit[1]))


def _parts(dotted: str) -> Iterator[str]:
    """Yield the keys of a dotted key, without their quotes. A quoted key with a dot gets a place nearby."""
    yield from (part.strip().strip("\"'") for part in dotted.split("."))

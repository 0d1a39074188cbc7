"""Another machine, described by a TOML file, to plan and compile for. A faulty file is refused as a whole."""

from __future__ import annotations

import re
import reprlib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

from ktc.diagnostics import Diagnostic, InputRefused, Span
from ktc.foundation.environment import MOST_THREADS
from ktc.foundation.host import Gpu, Host, detect
from ktc.foundation.isa import INSTRUCTION_SETS, PREFERENCE, isa_of
from ktc.foundation.regular_files import read_regular

T = TypeVar("T")
_BYTE_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("iB", 1024), ("B", 1000))
    for power, prefix in enumerate("KMGT", start=1)
}


def read_host_file(path: str | Path) -> Host:
    """Return the machine in a TOML file: `isa`, `cores`, `numa`, `memory` (bytes or `"512GiB"`), `[[gpu]] memory`.

    Missing entries are taken from this machine, except GPUs: none are assumed.
    Raises `InputRefused` with all faults of the file (H200 unreadable, H201 not TOML, H202 key, H203 value).
    """
    try:
        text = read_regular(Path(path)).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputRefused(Diagnostic("H200", f"cannot read the host file `{path}`: {error}")) from error
    try:
        entries = cast("dict[str, object]", tomllib.loads(text))
    except (ValueError, RecursionError) as error:  # tomllib also raises on dates and numbers that cannot be
        words = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        fault = Diagnostic("H201", f"the host file is not TOML: {words}", _toml_place(path, text, words))
        raise InputRefused(fault, sources={str(path): text}) from error
    return _HostFile(str(path), text).read(entries, detect())


class _HostFile:
    """Check the entries of a host file, and collect all faults."""

    def __init__(self, path: str, text: str) -> None:
        self._path, self._text = path, text
        self._faults: list[Diagnostic] = []

    def read(self, entries: Mapping[str, object], here: Host) -> Host:
        self._refuse_unknown(entries, ("isa", "cores", "numa", "memory", "gpu"))
        isa = self._value(entries, "isa", isa_of, f"one of {', '.join(PREFERENCE)}")
        cores = self._value(entries, "cores", _cores, f"a count from 1 to {MOST_THREADS}")
        numa = self._value(entries, "numa", _count, "a count above zero")
        memory = self._value(entries, "memory", parse_bytes, 'a size such as "512GiB"')
        gpus = self._gpus(entries.get("gpu", []))
        if self._faults:
            raise InputRefused(*self._faults, sources={self._path: self._text})
        host = replace(here, gpus=gpus, memory=memory or here.memory, numa=numa or here.numa)
        if cores:
            host = replace(host, cores=cores, threads=cores)
        if isa:
            isas = PREFERENCE[PREFERENCE.index(isa) :]
            features = frozenset[str]().union(*(INSTRUCTION_SETS[name].cpu for name in isas))
            host = replace(host, isas=isas, features=features)
        return host

    def _gpus(self, tables: object) -> tuple[Gpu, ...]:
        gpus: list[Gpu] = []
        for number, entry in enumerate(cast("list[object]", tables) if isinstance(tables, list) else [None]):
            if not isinstance(entry, dict):
                self._fault("H203", "gpu", "`gpu` must be written as `[[gpu]]` tables")
                continue
            table = cast("dict[str, object]", entry)
            self._refuse_unknown(table, ("name", "memory"))
            memory = self._value(table, "memory", parse_bytes, 'a size such as "24GiB"')
            if memory is None and "memory" not in table:
                self._fault("H203", "[[gpu]]", "a `[[gpu]]` table must have `memory`")
            gpus.append(Gpu(str(table.get("name", f"gpu {number}")), memory or 0))
        return tuple(gpus)

    def _refuse_unknown(self, entries: Mapping[str, object], known: tuple[str, ...]) -> None:
        for key in entries:
            if key not in known:
                self._fault("H202", key, f"unknown key `{key}`: expected one of {', '.join(known)}")

    def _value(
        self, entries: Mapping[str, object], key: str, convert: Callable[[object], T | None], what: str
    ) -> T | None:
        value = convert(entries[key]) if key in entries else None
        if key in entries and value is None:
            self._fault("H203", key, f"`{key}` must be {what}, found `{reprlib.repr(entries[key]):.100}`")
        return value

    def _fault(self, code: str, key: str, message: str) -> None:
        entry = re.search(rf"^[ \t]*({re.escape(key)})", self._text, re.MULTILINE)
        start = entry.start(1) if entry else 0
        line = self._text.count("\n", 0, start) + 1
        column = start - (self._text.rfind("\n", 0, start) + 1) + 1
        self._faults.append(Diagnostic(code, message, Span(self._path, line, column, line, column + len(key))))


_MOST_BYTES = 1 << 60  # of memory: beyond, a number is a mistake


def parse_bytes(value: object) -> int | None:
    """Return a size in bytes from `1024`, `"64GiB"` or `"1.5 TB"`; `None` if it is not a size."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    if isinstance(value, int) and not 0 < value < _MOST_BYTES:
        return None
    size = re.fullmatch(r"(\d{1,20}(?:\.\d{1,20})?)\s*([KMGT]?(?:iB|B)?)", str(value).strip())
    if not size or size[2] not in _BYTE_UNITS:
        return None
    return int(float(size[1]) * _BYTE_UNITS[size[2]]) or None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _cores(value: object) -> int | None:
    count = _count(value)
    return count if count is not None and count <= MOST_THREADS else None


def _toml_place(path: str | Path, text: str, message: str) -> Span:
    """Return the place that a message names; otherwise the last line."""
    named = re.search(r"at line (\d+), column (\d+)", message)
    line, column = (int(named[1]), int(named[2])) if named else (text.count("\n") + 1, 1)
    return Span(str(path), line, column, line, column + 1)

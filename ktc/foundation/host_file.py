"""A machine in a TOML file: one to plan and compile for, or this one as it was measured.

docs/reference/hosts.md has the schema.

In: a path, or the name of a bundled file. Out: a `Host` with its rates. A faulty file is refused as a whole: H200
unreadable, H201 not TOML, H202 unknown key, H203 value, H204 another version, H205 unknown name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final

from ktc.diagnostics import Diagnostic, InputRefused, listing, suggest
from ktc.foundation import resources
from ktc.foundation.environment import MOST_THREADS
from ktc.foundation.host import Gpu, Host, detect
from ktc.foundation.isa import INSTRUCTION_SETS, PREFERENCE, isa_of
from ktc.foundation.rates import Origin
from ktc.foundation.rates_file import CPU_KEYS, GPU_KEYS, TABLES, RatesReader, is_described
from ktc.foundation.toml_entries import Entries, FaultCodes, TomlFile

VERSION: Final = 1
"""Of the schema. A file without a version has the schema of version 1."""
SUFFIX: Final = ".toml"
_CODES: Final = FaultCodes("H200", "H201", "H202", "H203")
_KEYS: Final = ("version", "isa", "cores", "threads", "numa", "memory", "cpu", "gpu", *TABLES, "measured")
_MOST_BYTES: Final = 1 << 60  # of memory: beyond, a number is a mistake
_LONGEST_NAME: Final = 200
_BYTE_UNITS: Final = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("iB", 1024), ("B", 1000))
    for power, prefix in enumerate("KMGT", start=1)
}


@dataclass(frozen=True, slots=True)
class Measurement:
    """When `ktc doctor --measure` wrote a file, whether the machine was busy, and the version of ktc."""

    when: str
    busy: bool
    ktc: str


@dataclass(frozen=True, slots=True)
class HostFile:
    """The machine in a file, and its measurement: None for a machine that is described."""

    host: Host
    measurement: Measurement | None


def read_host(named: str | Path) -> Host:
    """Return the machine in a TOML file, or in the bundled file of this name. Raises `InputRefused` (H200 to H205)."""
    return read_host_file(_bundled(named) if _is_name(named) else Path(named))


def read_host_file(path: str | Path) -> Host:
    """Return the machine in a TOML file. Raises `InputRefused` with all faults of the file (H200 to H204).

    Missing facts are taken from this machine, except GPUs: none are assumed. Missing rates are those usual of the
    machine's processor and cards.
    """
    return read_file(path).host


def read_file(path: str | Path) -> HostFile:
    """Return the machine and its measurement. Raises as `read_host_file` does."""
    file = TomlFile(Path(path), str(path), _CODES)
    _require_version(file)
    root = file.root
    root.refuse_unknown(*_KEYS)
    measurement = _measurement(root)
    described = _with_facts(root, detect())
    origin: Origin = "measured" if measurement else "described" if is_described(root) else "assumed"
    rates = RatesReader(root, described).read(origin)
    file.raise_faults()
    if measurement:
        rates = replace(rates, when=measurement.when, busy=measurement.busy)
    return HostFile(replace(described, described=rates), measurement)


def bundled_names() -> tuple[str, ...]:
    """Return the names of the bundled machines."""
    return tuple(sorted(path.stem for path in resources.hosts().glob(f"*{SUFFIX}")))


def _is_name(named: str | Path) -> bool:
    return isinstance(named, str) and PurePosixPath(named).name == named and not named.endswith(SUFFIX)


def _bundled(name: str | Path) -> Path:
    names = bundled_names()
    if name in names:
        return resources.hosts() / f"{name}{SUFFIX}"
    hint = suggest(str(name), names)
    hint = f"{hint} " if hint else ""
    hint += f"bundled machines: {listing(names)}; a file is given by its path"
    raise InputRefused(Diagnostic("H205", f"there is no bundled machine `{name}`", hint=hint))


def _require_version(file: TomlFile) -> None:
    """Raise `InputRefused` (H204) alone for another version: its keys are unknown here."""
    version = file.root.table.get("version", VERSION)
    if version != VERSION or isinstance(version, bool):
        message = f"the host file has version {version!r:.100}, and this ktc reads version {VERSION}"
        file.fault("H204", ("version",), message, "measure again with `ktc doctor --measure`, or update ktc")
        file.raise_faults()


def _measurement(root: Entries) -> Measurement | None:
    entries = root.inside("measured")
    entries.refuse_unknown("when", "busy", "ktc")
    when = entries.value("when", _name, "a date in a text")
    busy = entries.value("busy", lambda value: value if isinstance(value, bool) else None, "true or false")
    ktc = entries.value("ktc", _name, "a version in a text")
    return Measurement(when or "", bool(busy), ktc or "") if "measured" in root else None


def _with_facts(root: Entries, here: Host) -> Host:
    """Return the machine of the file without its rates; facts that are missing are those of this machine."""
    isa = root.value("isa", isa_of, f"one of {', '.join(PREFERENCE)}")
    cores = root.value("cores", _threads, f"a count from 1 to {MOST_THREADS}")
    threads = root.value("threads", _threads, f"a count from 1 to {MOST_THREADS}")
    numa = root.value("numa", _threads, f"a count from 1 to {MOST_THREADS}")
    if (numa or 1) > (most := threads or cores or here.threads):
        root.file.fault("H203", (*root.keys, "numa"), f"`numa` = {numa} nodes need as many threads, there are {most}")
    memory = root.value("memory", parse_bytes, 'a size such as "512GiB"')
    cpu = root.inside("cpu")
    cpu.refuse_unknown("name", *CPU_KEYS)
    processor = cpu.value("name", _name, "a name")
    is_other = any(key in root for key in ("isa", "cores"))
    host = replace(
        here,
        gpus=tuple(_gpu(table, number) for number, table in enumerate(root.tables("gpu"))),
        memory=memory or here.memory,
        numa=numa or here.numa,
        cores=cores or here.cores,
        threads=threads or cores or here.threads,
        processor=processor or ("" if is_other else here.processor),
    )
    if isa:
        isas = PREFERENCE[PREFERENCE.index(isa) :]
        features = frozenset[str]().union(*(INSTRUCTION_SETS[name].cpu for name in isas))
        host = replace(host, isas=isas, features=features)
    return host


def _gpu(table: Entries, number: int) -> Gpu:
    table.refuse_unknown("name", "memory", *GPU_KEYS)
    name = table.value("name", _name, "a name")
    memory = table.value("memory", parse_bytes, 'a size such as "24GiB"')
    if "memory" not in table:
        table.file.fault("H203", table.keys, "a `[[gpu]]` table must have `memory`")
    return Gpu(name or f"gpu {number}", memory or 0)


def parse_bytes(value: object) -> int | None:
    """Return a size in bytes from `1024`, `"64GiB"` or `"1.5 TB"`; `None` if it is not a size."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    if isinstance(value, int) and not 0 < value < _MOST_BYTES:
        return None
    size = re.fullmatch(r"(\d{1,20}(?:\.\d{1,20})?)\s*([KMGT]?(?:iB|B)?)", str(value).strip())
    if not size or size[2] not in _BYTE_UNITS:
        return None
    nbytes = int(float(size[1]) * _BYTE_UNITS[size[2]])
    return nbytes if 0 < nbytes < _MOST_BYTES else None


def _name(value: object) -> str | None:
    return value if isinstance(value, str) and len(value) <= _LONGEST_NAME and value.isprintable() else None


def _threads(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MOST_THREADS:
        return None
    return value

"""The GGUF files of a folder: one file or the shards of one -> their tensors and the settings of the first.

Refused, with the file names: files of several models or formats in one folder (I120), missing shards (I114), shards of
different sets (I120), a tensor in two shards, and everything that `ktc.model.checkpoint.gguf_header` refuses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ktc.diagnostics import Diagnostic, InputRefused, listing
from ktc.model.checkpoint.gguf_header import GgufHeader, Setting, read_gguf_header
from ktc.model.checkpoint.header import HeaderRefused, TensorEntry

_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_ARCHITECTURE = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_MOST_MISSING = 5


def gguf_files(folder: Path) -> tuple[str, ...]:
    """Return the names of the GGUF files in `folder`, without hidden ones."""
    return tuple(sorted(path.name for path in folder.glob("*.gguf") if not path.name.startswith(".")))


def read_gguf(folder: Path) -> tuple[dict[str, TensorEntry], Mapping[str, Setting]]:
    """Return the tensors by name, in the order of files and bytes, and the settings. Raises `InputRefused`."""
    files = _one_model(folder, gguf_files(folder))
    headers: dict[str, GgufHeader] = {}
    problems: list[Diagnostic] = []
    for file in files:
        try:
            headers[file] = read_gguf_header(folder / file)
        except HeaderRefused as error:
            problems += error.diagnostics
        except OSError as error:
            problems.append(Diagnostic("I114", f"`{file}` cannot be read: {error.strerror}"))
    if problems:
        raise InputRefused(*problems)
    return _joined(files, headers), _checked_settings(files, headers)


def _one_model(folder: Path, files: Sequence[str]) -> Sequence[str]:
    """Return the files of the one model in the folder, shards in order."""
    shards = {file: name for file in files if (name := _SHARD.fullmatch(file))}
    if len(files) == 1 and not shards:
        return files
    sets = {(name[1], name[3]) for name in shards.values()}
    if len(sets) != 1 or len(shards) != len(files):
        message = f"`{folder}` holds GGUF files of several models: {listing(files, 6)}"
        raise InputRefused(Diagnostic("I120", message, hint="keep one file, or the shards of one, in a folder"))
    ((base, total),) = sets
    numbers = {int(name[2]) for name in shards.values()}
    missing = [number for number in range(1, int(total) + 1) if number not in numbers]
    if numbers - set(range(1, int(total) + 1)):
        raise InputRefused(_foreign(files[-1], f"has a number beyond the {int(total)} shards of its name"))
    if missing:
        names = listing((f"{base}-{number:05d}-of-{total}.gguf" for number in missing), _MOST_MISSING)
        message = f"{len(missing)} of {int(total)} shards are missing from `{folder}`: {names}"
        raise InputRefused(Diagnostic("I114", message, hint="download or copy them too"))
    return files


def _foreign(file: str, what: str) -> Diagnostic:
    return Diagnostic("I120", f"`{file}` {what}", hint="download or copy all shards of one file again")


def _joined(files: Sequence[str], headers: Mapping[str, GgufHeader]) -> dict[str, TensorEntry]:
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        for entry in headers[file].tensors:
            if entry.name in tensors:
                message = f"has tensor `{entry.name}`, which is in `{tensors[entry.name].file}` too"
                raise InputRefused(_foreign(file, message))
            tensors[entry.name] = entry
    return tensors


def _checked_settings(files: Sequence[str], headers: Mapping[str, GgufHeader]) -> Mapping[str, Setting]:
    """Return the settings of the first file if all files belong to one set. Raises `InputRefused`."""
    problems: list[Diagnostic] = []
    first = headers[files[0]].settings
    tensors = sum(len(header.tensors) for header in headers.values())
    expected = {"split.no": 0, "split.count": len(files), "split.tensors.count": tensors}
    for number, file in enumerate(files):
        expected["split.no"] = number
        for name, value in expected.items():
            stored = headers[file].settings.get(name, value)
            if stored != value and not (name == "split.count" and stored == 0 and len(files) == 1):
                problems.append(_foreign(file, f"has `{name}` = {stored!s:.40}, expected {value}"))
        kind = headers[file].settings.get("general.architecture", first.get("general.architecture"))
        if kind != first.get("general.architecture"):
            problems.append(_foreign(file, f"is of architecture `{kind!s:.64}`, the first shard is not"))
    if problems:
        raise InputRefused(*problems)
    architecture = first.get("general.architecture")
    if not isinstance(architecture, str) or not _ARCHITECTURE.fullmatch(architecture):
        message = f"`{files[0]}` names no architecture: its setting `general.architecture` is {architecture!s:.64}"
        raise InputRefused(Diagnostic("I112", message, hint=f"download or copy `{files[0]}` again"))
    kind = first.get("general.type", "model")
    if kind != "model":
        message = f"`{files[0]}` is not a model but has the type `{kind!s:.40}`"
        raise InputRefused(Diagnostic("I120", message, hint="name a folder with the GGUF file of a whole model"))
    return first

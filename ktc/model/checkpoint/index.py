"""The index of a checkpoint folder: every tensor's name, dtype, shape, file and byte range.

Reads the headers of `model.safetensors` or of the shards in `model.safetensors.index.json`, never the data. Without
these, reads the folder's GGUF file or its shards (`ktc.model.checkpoint.gguf_files`).
Refused, with all problems of all files together: no weights, pickled weights, a broken or truncated shard, a missing
shard, a tensor missing from its shard, a file name outside the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.decode import read_json
from ktc.foundation.regular_files import read_regular
from ktc.model.checkpoint.gguf_files import gguf_files, read_gguf
from ktc.model.checkpoint.gguf_header import Setting
from ktc.model.checkpoint.header import HeaderRefused, TensorEntry, read_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """The tensors of a checkpoint by name, in order of files and bytes. Paths are `folder / entry.file`.

    `gguf` has the settings of a GGUF file, whose tensors have GGUF names. `unread` lists GGUF files in the folder of
    the safetensors that were read.
    """

    folder: Path
    tensors: Mapping[str, TensorEntry]
    gguf: Mapping[str, Setting] | None = None
    unread: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(sorted({entry.file for entry in self.tensors.values()}))

    @property
    def bytes(self) -> int:
        return sum(entry.end - entry.begin for entry in self.tensors.values())


def has_weights(folder: Path) -> bool:
    """Return whether `folder` holds weights of any kind, which distinguishes a checkpoint from a config alone."""
    patterns = ("*.safetensors", INDEX_FILE, "*.gguf", *_PICKLES)
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)


def open_index(folder: Path) -> CheckpointIndex:
    """Return the index of the checkpoint in `folder`. Raises `InputRefused` with every problem found."""
    weight_map = _read_weight_map(folder) if (folder / INDEX_FILE).is_file() else None
    gguf = gguf_files(folder)
    if weight_map is None and not (folder / SINGLE_FILE).is_file():
        if gguf:
            return CheckpointIndex(folder, *read_gguf(folder))
        raise InputRefused(_nothing_to_read(folder))
    files = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE_FILE]
    by_file, problems = _read_headers(folder, files)
    if weight_map is not None:
        problems += _missing_tensors(weight_map, by_file)
    if problems:
        raise InputRefused(*problems)
    return CheckpointIndex(folder, _merge(weight_map or {}, by_file), unread=gguf)


def _nothing_to_read(folder: Path) -> Diagnostic:
    pickled = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickled:
        return Diagnostic(
            "I111",
            f"`{folder}` holds pickled weights (`{pickled[0]}`), which run code when they are read",
            hint="write it again as safetensors: load it with transformers where you trust it, then `save_pretrained`",
        )
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    hint = f"`{INDEX_FILE}` is missing for `{shards[0]}`" if shards else "name a folder that holds the whole checkpoint"
    message = f"`{folder}` holds neither `{SINGLE_FILE}` nor `{INDEX_FILE}` nor a GGUF file"
    return Diagnostic("I111", message, hint=hint)


def _read_weight_map(folder: Path) -> dict[str, str]:
    try:
        content: Any = read_json(read_regular(folder / INDEX_FILE))
    except ValueError as error:
        raise InputRefused(_bad_index(f"is not JSON: {error}")) from error
    except OSError as error:
        raise InputRefused(_bad_index(f"cannot be read: {error.strerror}")) from error
    weight_map = cast("dict[str, Any]", content).get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputRefused(_bad_index("has no `weight_map` object"))
    weight_map = cast("dict[str, Any]", weight_map)
    bad = {str(file)[:100] for file in weight_map.values() if not _is_shard_name(file)}
    if bad:
        raise InputRefused(
            *(_bad_index(f"names the shard `{file}`, which is not a plain file name") for file in sorted(bad))
        )
    return weight_map


def _bad_index(what: str) -> Diagnostic:
    return Diagnostic("I113", f"`{INDEX_FILE}` {what}", hint=f"download or copy `{INDEX_FILE}` again")


def _is_shard_name(file: object) -> bool:
    return (
        isinstance(file, str)
        and file.endswith(".safetensors")
        and not set(file) & set("/\\\0")
        and not file.startswith(".")
    )


def _read_headers(folder: Path, files: list[str]) -> tuple[dict[str, tuple[TensorEntry, ...]], list[Diagnostic]]:
    """Return the entries of each readable file, and the problems of the others."""
    by_file: dict[str, tuple[TensorEntry, ...]] = {}
    problems: list[Diagnostic] = []
    for file in files:
        try:
            by_file[file] = read_header(folder / file)
        except HeaderRefused as error:
            problems += error.diagnostics
        except FileNotFoundError:
            message = f"shard `{file}` is missing from `{folder}`"
            problems.append(Diagnostic("I114", message, hint=f"download or copy `{file}`; `{INDEX_FILE}` names it"))
        except OSError as error:
            problems.append(Diagnostic("I114", f"shard `{file}` cannot be read: {error.strerror}"))
    return by_file, problems


def _missing_tensors(weight_map: Mapping[str, str], by_file: Mapping[str, tuple[TensorEntry, ...]]) -> list[Diagnostic]:
    present = {file: {entry.name for entry in entries} for file, entries in by_file.items()}
    return [
        Diagnostic(
            "I115",
            f"shard `{file}` lacks tensor `{name}`, which `{INDEX_FILE}` puts there",
            hint=f"download or copy `{file}` again",
        )
        for name, file in weight_map.items()
        if file in present and name not in present[file]
    ]


def _merge(weight_map: Mapping[str, str], by_file: Mapping[str, tuple[TensorEntry, ...]]) -> dict[str, TensorEntry]:
    """Return all tensors of all files; for a name in two files, the index decides."""
    merged: dict[str, TensorEntry] = {}
    for file, entries in by_file.items():
        for entry in entries:
            if weight_map.get(entry.name, file) == file:
                merged[entry.name] = entry
    return merged

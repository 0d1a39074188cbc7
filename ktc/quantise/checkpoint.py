"""`ktc quantize`: a checkpoint in INT4 that stock transformers, vLLM and ktc load, written file by file.

In: a checkpoint of full precision (or a compiled model of one), a scheme, and what of the model it applies to. Out: a
folder of compressed-tensors' `pack-quantized`. Each file is whole or absent: a run that is stopped leaves its finished
files in `OUT.unfinished`, and the same command goes on with the others.
Refused: an existing OUT (A609), what `select` refuses, and weights that are not finite (Q504).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ktc.adapters.base_model import read_base
from ktc.adapters.merge import copy_others
from ktc.adapters.save import require_new
from ktc.checkpoint.header import TensorEntry
from ktc.checkpoint.index import INDEX_FILE, CheckpointIndex, open_index
from ktc.checkpoint.reader import TensorReader
from ktc.diagnostics import InputRefused
from ktc.files import finish_folder, move_file, refusing, replaced_file, write_file
from ktc.model.progress import Progress
from ktc.quantise.scheme import Scheme
from ktc.quantise.selection import Modules, Selection, select
from ktc.quantise.shards import stored_parts, write_shard

_STATE: Final = "quantising.json"  # what the finished files were made of


@dataclass(frozen=True, slots=True)
class QuantisedCheckpoint:
    """What was written: quantised and all tensors of the original, bytes before and after, files found finished."""

    path: Path
    quantised: int
    tensors: int
    bytes_before: int
    bytes_after: int
    resumed_files: int


def quantize(
    model: Path, out: Path, scheme: Scheme, modules: Modules = "experts", progress: Progress | None = None
) -> QuantisedCheckpoint:  # fmt: skip
    """Write `model` in `scheme` to the folder `out`. Raises InputRefused; nothing is left at `out` then."""
    base = read_base(model)
    index = open_index(base.folder)
    selection = select(base, index, scheme, modules)
    require_new(out)
    with refusing(out):
        work = out.with_name(f"{out.name}.unfinished")
        resumed = _resumed(work, _identity(index, scheme, selection))
        try:
            _write(index, selection, scheme, work, resumed, progress or (lambda done, total: None))
        except InputRefused:
            shutil.rmtree(work, ignore_errors=True)  # the same command would be refused again
            raise
        copy_others(base.folder, work)
        _write_config(work, scheme, selection)
        _write_index(work, index, selection, scheme)
        (work / _STATE).unlink()
        finish_folder(work)
        move_file(work, out)
    after = sum((out / file).stat().st_size for file in index.files)
    return QuantisedCheckpoint(out, len(selection.tensors), len(index.tensors), index.bytes, after, len(resumed))


def _identity(index: CheckpointIndex, scheme: Scheme, selection: Selection) -> str:
    """Return a digest of all that decides the files: the original's, the scheme, and what is quantised."""
    digest = hashlib.sha256(f"{scheme}".encode())
    for file in index.files:
        status = (index.folder / file).stat()
        digest.update(f"{index.folder.resolve()}/{file} {status.st_size} {status.st_mtime_ns}\n".encode())
    for name in sorted(selection.tensors):
        digest.update(f"{name}\n".encode())
    return digest.hexdigest()


def _resumed(work: Path, identity: str) -> frozenset[str]:
    """Return the finished files in `work`, which is emptied if they were made of something else."""
    state = work / _STATE
    if state.is_file() and state.read_text(encoding="utf-8") == identity:
        return frozenset(path.name for path in work.glob("*.safetensors"))
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    write_file(state, identity)
    return frozenset()


def _write(
    index: CheckpointIndex, selection: Selection, scheme: Scheme, work: Path, resumed: frozenset[str],
    progress: Progress,
) -> None:  # fmt: skip
    read = 0

    def done(nbytes: int) -> None:
        nonlocal read
        read += nbytes
        progress(read, index.bytes)

    with TensorReader(index.folder) as reader:
        for file in index.files:
            entries = _of_file(index, file)
            if file in resumed:
                done(sum(entry.end - entry.begin for entry in entries))
                continue
            with replaced_file(work / file) as beside:
                write_shard(entries, selection.tensors, scheme, reader, beside, done)


def _of_file(index: CheckpointIndex, file: str) -> list[TensorEntry]:
    return sorted((each for each in index.tensors.values() if each.file == file), key=lambda each: each.begin)


def _write_config(work: Path, scheme: Scheme, selection: Selection) -> None:
    path = work / "config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    config["quantization_config"] = scheme.config(selection.ignored)
    write_file(path, json.dumps(config, indent=2) + "\n")


def _write_index(work: Path, index: CheckpointIndex, selection: Selection, scheme: Scheme) -> None:
    """Write the index of several files, with the names and bytes of what they hold now."""
    if len(index.files) == 1:
        (work / INDEX_FILE).unlink(missing_ok=True)
        return
    parts = [(entry, _parts(entry, selection.tensors, scheme)) for entry in index.tensors.values()]
    weight_map = {name: entry.file for entry, stored in parts for name, *_ in stored}
    total = sum(size for _, stored in parts for *_, size in stored)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_file(work / INDEX_FILE, json.dumps(content, indent=2) + "\n")


def _parts(entry: TensorEntry, chosen: Mapping[str, TensorEntry], scheme: Scheme) -> Iterable[tuple[Any, ...]]:
    return stored_parts(entry, scheme if entry.name in chosen else None)

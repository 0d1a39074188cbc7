"""`ktc quantize` and `ktc merge --int4`: a checkpoint in INT4 that stock transformers, vLLM and ktc load.

In: a checkpoint (or a compiled model of one), a scheme, what of the model it applies to, and for a merge an adapter,
which is added before rounding. Out: a folder of compressed-tensors' `pack-quantized`, written file by file. Each file
is whole or absent: a run that is stopped leaves its finished files in `OUT.unfinished`, and the same command goes on
with the others.
Refused: an existing OUT (A609), what `open_original`, `select` and `require_trained_grid` refuse, and weights that are
not finite (Q504).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from ktc.adapters.conversion import write_record
from ktc.adapters.merge import copy_others
from ktc.adapters.save import require_new
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.files import finish_folder, put_folder, refusing, replaced_file, write_file
from ktc.foundation.progress import Progress
from ktc.foundation.regular_files import read_regular
from ktc.inference.quantize.original import Original, open_original, require_one_rounding
from ktc.inference.quantize.scheme import Scheme
from ktc.inference.quantize.selection import Modules, Selection, select
from ktc.inference.quantize.shards import Rounding, stored_parts, write_shard
from ktc.inference.quantize.trained_grids import Rounded, require_trained_grid, rounded_in_training
from ktc.model.checkpoint.index import INDEX_FILE, SINGLE_FILE, CheckpointIndex
from ktc.model.checkpoint.int4 import Int4Grid
from ktc.model.hf.conversions import loads_single_experts

_STATE: Final = "quantising.json"  # what the finished files are made of, and what rounding did in each


@dataclass(frozen=True, slots=True)
class QuantisedCheckpoint:
    """What was written: quantised and all tensors of the original, bytes before and after, files found finished.

    `stacks` of experts were written as one matrix per expert and part; `loads_in_transformers`: stock transformers has
    names for such matrices in this family.

    `rounding_error` is |change| / |weights| of the quantised weights, by Frobenius norms. `drift` is |change| /
    |adapter|: what rounding changed, in terms of what a merged adapter added to these weights.
    """

    path: Path
    quantised: int
    tensors: int
    stacks: int
    loads_in_transformers: bool
    bytes_before: int
    bytes_after: int
    resumed_files: int
    rounding_error: float
    drift: float | None


def quantize(  # noqa: PLR0913 - the options of a command, by keyword
    model: Path, out: Path, scheme: Scheme, modules: Modules = "experts", progress: Progress | None = None, *,
    adapter: Path | None = None, requantise: bool = False, force: bool = False,
) -> QuantisedCheckpoint:  # fmt: skip
    """Write `model` in `scheme` to the folder `out`, with `adapter` merged into it. Nothing is at `out` if refused.

    `requantise`: the adapter was trained beside rounded weights, and merging may round them again. `force` permits the
    replacement of a merged or quantised model at `out`. Raises InputRefused.
    """
    rounded = rounded_in_training(model, adapter) if adapter else dict[str, Rounded]()
    original = open_original(model, adapter, lambda module: modules != "trained" or module in rounded)
    require_one_rounding(original, requantise)
    selection = select(original.base, original.index, scheme, modules, rounded)
    if not requantise:
        require_trained_grid(rounded, selection.taken, scheme, modules)
    grids = _frozen(selection, rounded)
    require_new(out, force, (model, adapter))
    work = out.with_name(f"{out.name}.unfinished")
    kept = f"finished files are in `{work}`, and the same command goes on with the others"
    with refusing(out, safe=kept), _claimed(work):
        state = _State(work, _identity(original, scheme, selection, grids))
        resumed = len(state.finished)
        try:
            _write(original, selection, scheme, grids, state, progress or (lambda done, total: None))
        except InputRefused:
            shutil.rmtree(work, ignore_errors=True)  # the same command would be refused again
            raise
        copy_others(original.base.folder, work)
        _write_config(work, scheme, selection)
        _write_index(work, original.index, selection, scheme)
        settings = {"scheme": scheme.name, "modules": modules, "requantise": str(requantise)}
        write_record(work, "int4", model, adapter, settings, original.index.files)
        (work / _STATE).unlink()
        finish_folder(work)
        put_folder(work, out, replaces=force)
    index, roundings = original.index, state.finished.values()
    stacks = original.matrices.stacks if original.matrices else 0
    weights, change, added = (
        math.fsum(getattr(rounding, name) for rounding in roundings) for name in Rounding.__slots__
    )
    return QuantisedCheckpoint(
        path=out,
        quantised=len(selection.tensors),
        tensors=len(original.stored.tensors),
        stacks=stacks,
        loads_in_transformers=not stacks or loads_single_experts(original.base.model),
        bytes_before=index.bytes,
        bytes_after=sum((out / file).stat().st_size for file in index.files),
        resumed_files=resumed,
        rounding_error=math.sqrt(change / weights) if weights else 0.0,
        drift=math.sqrt(change / added) if added else None,
    )


@contextmanager
def _claimed(work: Path) -> Generator[None]:
    """Make the folder that is filled, and lock it against another such run (Q514)."""
    work.mkdir(parents=True, exist_ok=True)
    lock = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        message = f"another process is writing `{work}`"
        raise InputRefused(Diagnostic("Q514", message, hint="wait for it, or name another folder with `-o`")) from error
    finally:
        os.close(lock)


def _frozen(selection: Selection, rounded: Mapping[str, Rounded]) -> Mapping[str, Int4Grid]:
    """Return the grid of each tensor that was frozen and rounded while the adapter trained."""
    grids = {path: Int4Grid.parse(training.grid) for path, training in rounded.items() if training.is_frozen}
    return {name: grid for name, module in selection.modules.items() if (grid := grids.get(module)) is not None}


def _identity(original: Original, scheme: Scheme, selection: Selection, grids: Mapping[str, Int4Grid]) -> str:
    """Return a digest of all inputs of the files: the original's files, the adapter, the scheme, the selection."""
    frozen = sorted((name, str(grid)) for name, grid in grids.items())
    digest = hashlib.sha256(f"{scheme} {frozen} {original.adapter_digest}\n".encode())
    folder = original.index.folder
    for file in original.index.files:
        status = (folder / file).stat()
        digest.update(f"{folder.resolve()}/{file} {status.st_size} {status.st_mtime_ns}\n".encode())
    for name in sorted(selection.tensors):
        digest.update(f"{name}\n".encode())
    return digest.hexdigest()


class _State:
    """The folder that is filled, and its finished files. Files of another run are removed."""

    def __init__(self, work: Path, identity: str) -> None:
        self.work, self._identity = work, identity
        self.finished: dict[str, Rounding] = self._found()
        if not self.finished:
            for left in work.iterdir():  # the folder itself is locked
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        self._save()

    def finish(self, file: str, rounding: Rounding) -> None:
        self.finished[file] = rounding
        self._save()

    def _save(self) -> None:
        files = {file: asdict(rounding) for file, rounding in self.finished.items()}
        write_file(self.work / _STATE, json.dumps({"identity": self._identity, "files": files}))

    def _found(self) -> dict[str, Rounding]:
        try:
            state = json.loads(read_regular(self.work / _STATE).decode())
            if state["identity"] != self._identity:
                return {}
            files = {str(file): Rounding(**rounding) for file, rounding in state["files"].items()}
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return {file: rounding for file, rounding in files.items() if (self.work / file).is_file()}


def _write(
    original: Original, selection: Selection, scheme: Scheme, grids: Mapping[str, Int4Grid], state: _State,
    progress: Progress,
) -> None:  # fmt: skip
    index = original.index
    read = 0

    def done(nbytes: int) -> None:
        nonlocal read
        read += nbytes
        progress(read, index.bytes)

    with original.reader(grids) as (reader, added):
        for file in index.files:
            entries = sorted((e for e in index.tensors.values() if e.file == file), key=lambda entry: entry.begin)
            if file in state.finished:
                done(sum(entry.end - entry.begin for entry in entries))
                continue
            with replaced_file(state.work / file) as unfinished:
                rounding = write_shard(entries, selection.tensors, scheme, reader, unfinished, done, added)
            state.finish(file, rounding)


def _write_config(work: Path, scheme: Scheme, selection: Selection) -> None:
    path = work / "config.json"
    config: dict[str, Any] = json.loads(read_regular(path).decode())
    config["quantization_config"] = scheme.config(selection.ignored)
    write_file(path, json.dumps(config, indent=2) + "\n")


def _write_index(work: Path, index: CheckpointIndex, selection: Selection, scheme: Scheme) -> None:
    """Write the index of several files, with the names and bytes of what they hold now."""
    if index.files == (SINGLE_FILE,):
        (work / INDEX_FILE).unlink(missing_ok=True)
        return
    parts = [
        (entry, stored_parts(entry, scheme if entry.name in selection.tensors else None))
        for entry in index.tensors.values()
    ]
    weight_map = {name: entry.file for entry, stored in parts for name, *_ in stored}
    total = sum(size for _, stored in parts for *_, size in stored)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_file(work / INDEX_FILE, json.dumps(content, indent=2) + "\n")

"""`ktc merge`: a checkpoint with an adapter added to its weights, written tensor by tensor.

In: the original (a compiled model or its checkpoint) and an adapter of any of PEFT's layouts. Out: a folder with the
original's shards under the same names, headers and dtypes, its index, config and tokenizer. `s B A` is added in fp32
and rounded once to the stored dtype. Memory has the factors of a few weights and some megabytes, for any size.
Refused: quantised and GGUF originals (A610), tensors of the adapter that match no stored tensor, tied weights,
storage that ktc cannot add to (A611), and an existing folder (A609).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch
from torch import Tensor

from ktc.adapters.adapter import read_adapter, require_lora
from ktc.adapters.base_model import BaseModel, Target, find_base
from ktc.adapters.conversion import write_record
from ktc.adapters.factors import FactorReader, Placed, Whole
from ktc.adapters.layouts import PlacedAdapter, place
from ktc.adapters.merged_reader import Addition, MergedReader, as_rows
from ktc.adapters.save import require_new
from ktc.diagnostics import Diagnostic, InputRefused, listing
from ktc.foundation.files import new_folder, refusing
from ktc.foundation.progress import Progress
from ktc.foundation.regular_files import open_regular
from ktc.model.checkpoint.adapter_uses import loses_additions, stored_as
from ktc.model.checkpoint.header import TensorEntry
from ktc.model.checkpoint.index import INDEX_FILE, CheckpointIndex, open_index
from ktc.model.checkpoint.reader import TensorReader
from ktc.model.hf.conversions import Place, Unmappable, placer
from ktc.model.hf.missing import why_missing
from ktc.model.hf.tied_weights import tied_names

_FLOATS = ("bf16", "f16", "f32", "f64")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_COPIED = 1 << 24  # bytes that are copied at once
_ADDED = 1 << 22  # weights that are added to at once: 16 MB as fp32


@dataclass(frozen=True, slots=True)
class Merged:
    """A written checkpoint: the changed tensors, all tensors, and the bytes of its shards."""

    path: Path
    changed: int
    tensors: int
    bytes: int


def merge(
    adapter: Path, out: Path, model: Path | None = None, progress: Progress | None = None, *, force: bool = False
) -> Merged:
    """Write the original with `adapter` added to `out`; `model` is the original, if the adapter does not name it.

    `force` permits the replacement of a merged or quantised model at `out`.
    """
    opened = require_lora(read_adapter(adapter))
    base = find_base(opened, model)
    index = open_index(base.folder)
    _refuse_quantised(base, index)
    placed = place(opened, base)
    additions = plan_additions(placed, index)
    require_new(out, force, (base.folder, adapter))
    with (
        refusing(out),
        new_folder(out, replaces=force) as draft,
        FactorReader(opened.weights) as factors,
        TensorReader(base.folder) as reader,
    ):
        merged = MergedReader(additions, factors, reader)
        writer = _Writer(index, additions, merged, progress or (lambda done, total: None))
        for file in index.files:
            writer.write(file, draft / file)
        copy_others(base.folder, draft)
        write_record(draft, "merge", base.folder, adapter, {}, index.files)
    return Merged(out, len(additions), len(index.tensors), index.bytes)


def plan_additions(placed: PlacedAdapter, index: CheckpointIndex) -> Mapping[str, Addition]:
    """Return the addition to each stored tensor, by its name.

    Raises:
        InputRefused: A611 for tied weights, storage that ktc cannot add to, and factors without a stored tensor.
    """
    base = placed.base
    targets: dict[str, Tensor] = base.model.state_dict()
    wanted: dict[str, Placed | Whole] = {trained.name: trained for trained in (*placed.placed, *placed.whole)}
    problems: list[Diagnostic] = []
    for name in sorted(wanted.keys() & tied_names(base.model)):
        message = f"`{name}` is tied to another weight of the model, which the adapter does not change"
        problems.append(Diagnostic("A611", message, hint="train without it, or untie the original first"))
    additions: dict[str, Addition] = {}
    find = placer(base.model, targets)
    for entry in index.tensors.values():
        spot = find(entry.name, entry.shape)
        target = spot.target if isinstance(spot, Place) else ""
        if target not in wanted:
            continue
        addition = _addition(entry, cast("Place", spot), wanted[target])
        if isinstance(addition, str):
            message = f"nothing can be added to stored tensor `{entry.name}`: it {addition}"
            problems.append(Diagnostic("A611", message, hint="use it with peft"))
        else:
            additions[entry.name] = addition
    lost = [name for name, entry in index.tensors.items() if isinstance(find(name, entry.shape), Unmappable)]
    why = f"there are {listing(lost, 3)}, whose place is not known" if lost else why_missing(base.config, index, ())
    problems += _left_out(wanted, additions.values(), why)
    if problems:
        raise InputRefused(*problems[:10])
    return additions


# What cannot be merged


def _refuse_quantised(base: BaseModel, index: CheckpointIndex) -> None:
    stored = stored_as(index, base.config, base.config.get_text_config())
    if why := loses_additions(stored):
        message = f"`{base.name}` is {stored}: {why}"
        hint = "merge into the original of full precision, or use the adapter beside the model"
        raise InputRefused(Diagnostic("A610", message, hint=hint))


def _addition(entry: TensorEntry, spot: Place, placed: Placed | Whole) -> Addition | str:
    """Return the addition to the stored tensor, or the reason why there cannot be one."""
    if spot.steps or spot.joined:
        return "is stored in another form than the model has it"
    if entry.dtype not in _FLOATS:
        return f"is stored as {entry.dtype}"
    part = spot.part if spot.expert is not None and spot.part in ("gate", "up") else ""
    expected = _stored_shape(placed, spot.expert, part)
    if entry.shape != expected:
        return f"has shape {list(entry.shape)}, expected {list(expected)}"
    return Addition(entry, placed, spot.expert, part)


def _stored_shape(placed: Placed | Whole, expert: int | None, part: str) -> tuple[int, ...]:
    if isinstance(placed, Whole) and (placed.target is None or expert is None):
        return placed.entry.shape
    target = cast("Target", placed.target)
    if not target.experts:
        return target.out_features, target.in_features
    if expert is not None:
        return target.out_features // (2 if part else 1), target.in_features
    sizes = (target.out_features, target.in_features)
    return (target.experts, *(reversed(sizes) if target.transposed else sizes))


def _left_out(wanted: Mapping[str, Placed | Whole], additions: Iterable[Addition], why: str) -> Iterator[Diagnostic]:
    """Yield a finding for each adapted weight that the checkpoint does not have, or not all experts and halves of."""
    taken: dict[str, set[tuple[int | None, str]]] = {}
    for addition in additions:
        taken.setdefault(addition.placed.name, set()).add((addition.expert, addition.part))
    for name, placed in wanted.items():
        target = placed.target
        parts = ("gate", "up") if target is not None and target.is_gate_up else ("",)
        complete: list[set[tuple[int | None, str]]] = [{(None, "")}]
        if target is not None and target.experts:
            complete.append({(expert, part) for expert in range(target.experts) for part in parts})
        if taken.get(name) in complete:
            continue
        message = f"the checkpoint has no tensor, or not all tensors, of `{name}`, which the adapter changes"
        yield Diagnostic("A611", message, hint=why)


# Writing


class _Writer:
    """Copies shards with the same header, and adds to the tensors that an adapter changes."""

    def __init__(
        self, index: CheckpointIndex, additions: Mapping[str, Addition], merged: MergedReader, progress: Progress
    ) -> None:
        self._index, self._additions, self._merged = index, additions, merged
        self._progress, self._done = progress, 0

    def write(self, file: str, path: Path) -> None:
        entries = sorted((e for e in self._index.tensors.values() if e.file == file), key=lambda e: e.begin)
        with open_regular(self._index.folder / file) as source, path.open("wb") as out:
            length = 8 + int.from_bytes(source.read(8), "little")
            source.seek(0)
            out.write(source.read(length))
            for entry in entries:
                if entry.name in self._additions:
                    self._add(entry, out)
                else:
                    source.seek(entry.begin)
                    _copy(source, out, entry.end - entry.begin)
                self._done += entry.end - entry.begin
                self._progress(self._done, self._index.bytes)
            if out.tell() != os.fstat(source.fileno()).st_size:
                hint = f"download or copy `{file}` again"
                raise InputRefused(Diagnostic("I112", f"`{file}` was cut short while it was merged", hint=hint))

    def _add(self, entry: TensorEntry, out: IO[bytes]) -> None:
        """Write one tensor with its addition, a band of rows at a time; stacked matrices one after the other."""
        rows = as_rows(entry)
        band = max(1, _ADDED // max(1, rows.shape[1]))
        per_matrix = entry.shape[-2] if len(entry.shape) > 1 else 1
        for matrix in range(rows.shape[0] // per_matrix):
            for first in range(0, per_matrix, band):
                run = slice(matrix * per_matrix + first, matrix * per_matrix + min(first + band, per_matrix))
                out.write(self._merged.read(rows, run).view(torch.uint8).numpy().data)


def _copy(source: IO[bytes], out: IO[bytes], size: int) -> None:
    while size:
        data = source.read(min(size, _COPIED))
        if not data:
            return  # truncated after its header was read: the size of the shard shows it
        out.write(data)
        size -= len(data)


def copy_others(folder: Path, out: Path) -> None:
    """Copy everything of the original but its weights: index, config, tokenizer, templates, licence."""
    for path in sorted(folder.iterdir()):
        is_index = path.name == INDEX_FILE
        is_weights = path.suffix in _WEIGHTS or (path.name.endswith(".index.json") and not is_index)
        if path.is_file() and not path.name.startswith(".") and not is_weights:
            shutil.copyfile(path, out / path.name)

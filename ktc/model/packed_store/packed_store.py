"""The packed store of a compiled model: `OUT/packed`, one file per layer of experts, and `packed.json` that seals them.

In: a compiled model's manifest, its weight rows and the checkpoint they name. Out: the store's files, to be read or
mapped, or the reason why they cannot be used. Refused (L441): a damaged store. A store is stale (L442) if it was packed
by another kernel, or from a checkpoint whose files have changed in size or time; it is then never used. The packed
bytes are not read here: `ktc verify` does that. Models that are compiled for several uses have equal layers: their
stores share the files (`ktc.model.packing.sharing`).
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation import versions
from ktc.foundation.decode import Undecodable, decode, read_json, schema_fault
from ktc.foundation.files import write_file
from ktc.foundation.regular_files import read_regular
from ktc.model.checkpoint import CheckpointIndex, WeightSource
from ktc.model.manifest.manifest import Manifest, Rewrite
from ktc.model.packed_store import packed_file
from ktc.model.packed_store.packed_file import Damaged, Header, Origin

FOLDER: Final = "packed"
INDEX: Final = "packed.json"
SUFFIX: Final = ".packed"
SCHEMA: Final = 1
_REASONS: Final = {
    "kernel": "by another kernel",
    "rows": "from other tensors",
    "checkpoint": "from a checkpoint that has changed since",
}
# Of a step, the arguments that its packed bytes depend on: others are about the call, or the memory of a load.
_OF_THE_BYTES: Final = ("num_experts", "hidden", "intermediate", "form", "grid")


@dataclass(frozen=True, slots=True)
class PackedFile:
    """One layer's file: its size in bytes, the sha256 of its header as JSON, and the digest of its packed bytes."""

    fqn: str
    file: str
    size: int
    header: str
    content: str


@dataclass(frozen=True, slots=True)
class PackedIndex:
    """`packed.json`. `checkpoint` is the digest of all shards' names, sizes and times, `seal` that of the rest."""

    schema: int
    ktc: str
    checkpoint: str
    layers: tuple[PackedFile, ...]
    seal: str

    def sealed(self) -> PackedIndex:
        """Return a copy with its correct seal."""
        content = asdict(replace(self, seal=""))
        return replace(self, seal=_digest(content))


@dataclass(frozen=True, slots=True)
class PackedStore:
    """A store that is whole and belongs to the compiled model: the header of each layer by its module's name."""

    folder: Path
    headers: Mapping[str, Header]

    @property
    def size(self) -> int:
        """Packed bytes of all layers."""
        return sum(header.packed_bytes for header in self.headers.values())

    def path(self, fqn: str) -> Path:
        """Return the file of a layer."""
        return self.folder / file_name(fqn)


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that is to be packed: its step of the recipe, the rows that fill it, and the origin of its bytes."""

    step: Rewrite
    rows: tuple[WeightSource, ...]
    origin: Origin


def file_name(fqn: str) -> str:
    """Return a file name that stays in its folder and is unique per module name."""
    return f"{quote(fqn, safe='')}{SUFFIX}"


def layers(manifest: Manifest, sources: Sequence[WeightSource], index: CheckpointIndex) -> tuple[Layer, ...]:
    """Return the layers of experts that a kernel runs, in the order of the recipe.

    Raise `InputRefused` (L405) for a missing shard.
    """
    if manifest.library is None:
        return ()
    rows: dict[str, list[WeightSource]] = {}
    for source in sources:
        rows.setdefault(source.target.rpartition(".")[0], []).append(source)
    kernels = {record.entry: record for record in manifest.kernels}
    checkpoint = checkpoint_digest(index)
    made: list[Layer] = []
    for step in manifest.rewrites:
        if not is_stored(step):
            continue
        assert step.kernel is not None
        rows_of_step = tuple(rows.get(step.fqn, ()))
        record = kernels[step.kernel]
        layout = [step.args.get(name) for name in _OF_THE_BYTES]
        kernel = _digest([record.build, dict(record.spec), layout, asdict(manifest.versions)])
        tensors = _digest([manifest.model.config_sha256, [asdict(row) for row in rows_of_step]])
        made.append(Layer(step, rows_of_step, Origin(kernel, tensors, checkpoint)))
    return tuple(made)


def is_stored(step: Rewrite) -> bool:
    """Return whether a step's packed weights can be kept: those that change in training are packed from masters."""
    changes = bool(step.args.get("masters") or step.args.get("merged"))
    return step.kernel is not None and step.module == "fused_moe" and not changes


def checkpoint_digest(index: CheckpointIndex) -> str:
    """Return the digest of names, sizes and times of all files with tensors, which identifies a checkpoint."""
    return _digest([_identity(index.folder / file) for file in index.files])


def _identity(path: Path) -> tuple[str, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        message = f"shard `{path}` cannot be read: {error.strerror}"
        raise InputRefused(Diagnostic("L405", message, hint="restore the file, or compile again")) from error
    return path.name, status.st_size, status.st_mtime_ns


def find_store(
    folder: Path, manifest: Manifest, sources: Sequence[WeightSource], index: CheckpointIndex
) -> PackedStore | Diagnostic | None:
    """Open the store of the compiled model in `folder`; return a diagnostic if unusable, `None` if missing.

    L440 is an unfinished store, L442 a stale one. Headers, sizes and the seal are checked, the packed bytes are not
    read. Raise `InputRefused` (L441) for a damaged store.
    """
    place = folder / FOLDER
    if not place.is_dir():
        return None
    if not (place / INDEX).is_file():
        return Diagnostic("L440", f"the packed store `{place}` is not finished", hint=f"continue: `{renewal(folder)}`")
    listed = read_index(folder)
    wanted = layers(manifest, sources, index)
    if [layer.step.fqn for layer in wanted] != [entry.fqn for entry in listed.layers]:
        return _stale(folder, "for other layers")
    headers: dict[str, Header] = {}
    for layer, entry in zip(wanted, listed.layers, strict=True):
        header = headers[entry.fqn] = _checked_header(folder, entry)
        if difference := changed(header, layer):
            return _stale(folder, difference)
    if listed.checkpoint != checkpoint_digest(index):
        return _stale(folder, _REASONS["checkpoint"])
    return PackedStore(place, headers)


def read_index(folder: Path) -> PackedIndex:
    """Return `packed.json` of the compiled model in `folder`. Raises `InputRefused` (L441)."""
    path = folder / FOLDER / INDEX
    try:
        index = decode(read_json(read_regular(path)), PackedIndex)
    except (OSError, ValueError, Undecodable) as error:
        raise InputRefused(damaged(folder, path, str(error))) from error
    if fault := schema_fault(index.schema, SCHEMA):
        raise InputRefused(damaged(folder, path, f"it {fault}"))
    if index.sealed() != index:
        raise InputRefused(damaged(folder, path, "it was altered"))
    return index


def make_index(headers: Sequence[Header], checkpoint: str) -> PackedIndex:
    """Return the sealed index of finished layers."""
    entries = tuple(
        PackedFile(h.fqn, file_name(h.fqn), packed_file.DATA + h.packed_bytes, header_digest(h), h.content)
        for h in headers
    )
    return PackedIndex(SCHEMA, versions.__version__, checkpoint, entries, "").sealed()


def write_index(folder: Path, index: PackedIndex) -> None:
    """Write `packed.json`, whole or not at all. Raises `OSError`."""
    write_file(folder / FOLDER / INDEX, json.dumps(asdict(index), indent=1) + "\n")


def _checked_header(folder: Path, entry: PackedFile) -> Header:
    path = folder / FOLDER / file_name(entry.fqn)
    try:
        header = packed_file.read_header(path)
    except (Damaged, OSError) as error:
        raise InputRefused(damaged(folder, path, str(error))) from error
    if header_digest(header) != entry.header or path.stat().st_size != entry.size:
        raise InputRefused(damaged(folder, path, f"it is not the file that `{INDEX}` names"))
    return header


def header_digest(header: Header) -> str:
    """Return the entry of a header in `packed.json`."""
    return _digest(asdict(header))


def changed(header: Header, layer: Layer) -> str:
    """Return why a layer's packed bytes are stale; empty if they are current."""
    if (header.fqn, header.kernel) != (layer.step.fqn, layer.step.kernel):
        return _REASONS["kernel"]
    differing = [f.name for f in fields(Origin) if getattr(header.origin, f.name) != getattr(layer.origin, f.name)]
    return _REASONS[differing[0]] if differing else ""


def renewal(folder: Path) -> str:
    """Return the command that packs missing and stale layers."""
    return shlex.join(["ktc", "pack", str(folder)])


def _stale(folder: Path, why: str) -> Diagnostic:
    message = f"the packed store `{folder / FOLDER}` was made {why}"
    return Diagnostic("L442", message, hint=f"renew it: `{renewal(folder)}`")


def damaged(folder: Path, path: Path, what: str) -> Diagnostic:
    """Return the diagnostic about a damaged file of the store."""
    hint = f"pack it again: `{shlex.join(['rm', str(path)])} && {renewal(folder)}`"
    return Diagnostic("L441", f"`{path}` of the packed store is damaged: {what}", hint=hint)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

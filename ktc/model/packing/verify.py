"""Verification of a compiled model's folder: it reads in full the files whose headers alone a load checks.

In: a compiled model, and its checkpoint. Out: one `Finding` per claim: manifest and sealed files, rules, kernel
sources, library, checkpoint, packed store with the digest of every byte. Refused: a folder that is not a compiled
model, or whose manifest cannot be read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ktc.diagnostics import InputRefused
from ktc.foundation.files import file_digest
from ktc.foundation.progress import Progress, Tally
from ktc.foundation.regular_files import read_regular
from ktc.model.checkpoint import open_index
from ktc.model.loading import load_as
from ktc.model.manifest.manifest import FILE, Manifest, check_sealed, read_manifest
from ktc.model.packed_store import packed_file, packed_store, weight_store
from ktc.model.packed_store.packed_store import PackedStore
from ktc.model.packing.pack import pack_in_memory

State = Literal["good", "altered", "missing", "stale"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One claim, its state, and the fact that was found; `remedy` is the command that repairs it."""

    name: str
    state: State
    found: str
    remedy: str = ""


def verify(
    path: str | Path,
    *,
    weights: str | Path | None = None,
    source: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> tuple[Finding, ...]:
    """Check the compiled model in `path`; with `source` also that packing the checkpoint again gives the stored bytes.

    `weights` names the checkpoint if it has moved, `trust_remote_code` is that of `ktc.load`, for `source` alone.
    `progress` counts the packed bytes. Raises `InputRefused` as `read_manifest` does (L400 to L402).
    """
    folder = Path(path).resolve()
    manifest = read_manifest(folder)
    checkpoint = Path(weights) if weights is not None else Path(manifest.model.folder)
    return (
        *_files(folder, manifest),
        *_checkpoint(folder, manifest, checkpoint),
        *_store(folder, manifest, checkpoint, progress),
        *(_against_source(folder, checkpoint, trust_remote_code) if source else ()),
    )


def _files(folder: Path, manifest: Manifest) -> Iterator[Finding]:
    again = f"`{manifest.renewal(folder)}`"
    yield Finding(FILE, "good", f"schema {manifest.schema}, {len(manifest.rewrites)} rewrites")
    yield _sealed(folder, manifest, again)
    text = hashlib.sha256(_rule_text(folder).encode()).hexdigest()
    yield _compared("rules", text, manifest.rules.sha256, manifest.rules.name, again)
    for kernel in manifest.kernels:
        yield _digest("kernel source", folder / kernel.source, kernel.digest, again)
    if manifest.library is not None:
        yield _digest("library", folder / manifest.library.file, manifest.library.sha256, again)


def _sealed(folder: Path, manifest: Manifest, remedy: str) -> Finding:
    try:
        check_sealed(manifest, folder)
    except InputRefused as error:
        return Finding("sealed files", "altered", _words(error), remedy)
    return Finding("sealed files", "good", f"{len(manifest.files)} files as they were written")


def _words(error: InputRefused) -> str:
    return "; ".join(diagnostic.message for diagnostic in error.diagnostics)


def _rule_text(folder: Path) -> str:
    """Return the text of `OUT/rules` in the manifest's form."""
    root = folder / "rules"
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.ktr")}
    return "".join(f"# {file}\n{read_regular(path).decode(errors='replace')}" for file, path in sorted(files.items()))


def _digest(what: str, path: Path, expected: str, remedy: str) -> Finding:
    if not path.is_file():
        return Finding(what, "missing", f"no `{path.name}`", remedy)
    return _compared(what, file_digest(path), expected, path.name, remedy)


def _compared(what: str, digest: str, expected: str, name: str, remedy: str) -> Finding:
    if digest == expected:
        return Finding(what, "good", f"{name}, sha256 {digest[:12]}")
    return Finding(what, "altered", f"{name}: expected sha256 {expected[:12]}, found {digest[:12]}", remedy)


def _checkpoint(folder: Path, manifest: Manifest, checkpoint: Path) -> Iterator[Finding]:
    again = f"`{manifest.renewal(folder)}`"
    try:
        load_as.check_source(manifest, checkpoint)
        index = open_index(checkpoint)
        weight_store.check_unchanged(load_as.read_rows(folder, manifest), index)
    except InputRefused as error:
        yield Finding("checkpoint", "altered", _words(error), again)
        return
    size = sum(path.stat().st_size for path in map(index.folder.joinpath, index.files))
    yield Finding("checkpoint", "good", f"{checkpoint}: {len(index.files)} files, {size:,} bytes, tensors as compiled")


# The packed store


def _store(folder: Path, manifest: Manifest, checkpoint: Path, progress: Progress | None) -> Iterator[Finding]:
    if not (folder / packed_store.FOLDER).is_dir():
        return
    try:
        rows, index = load_as.read_rows(folder, manifest), open_index(checkpoint)
        store = packed_store.find_store(folder, manifest, rows, index)
    except InputRefused as error:
        store = error.diagnostics[0]
    if isinstance(store, PackedStore):
        yield Finding("packed store", "good", f"{len(store.headers)} layers, {store.size:,} bytes, sealed")
    elif store is not None:
        state = "altered" if store.code == "L441" else "stale"
        yield Finding("packed store", state, store.message, store.hint)
    try:
        listed = packed_store.read_index(folder)
    except InputRefused:  # reported above
        return
    yield from _contents(folder, listed, Tally(sum(entry.size - packed_file.DATA for entry in listed.layers), progress))


def _contents(folder: Path, index: packed_store.PackedIndex, tally: Tally) -> Iterator[Finding]:
    for entry in index.layers:
        path = folder / packed_store.FOLDER / packed_store.file_name(entry.fqn)
        try:
            digest = packed_file.stored_digest(path, entry.size - packed_file.DATA, tally.add)
        except (OSError, packed_file.Damaged) as error:
            state = "missing" if isinstance(error, FileNotFoundError) else "altered"
            yield Finding("packed layer", state, f"{path.name}: {error}", f"`{packed_store.renewal(folder)}`")
            continue
        remedy = packed_store.damaged(folder, path, "").hint
        yield _compared("packed layer", digest, entry.content, path.name, remedy)


def _against_source(folder: Path, checkpoint: Path, trusted: bool) -> Iterator[Finding]:
    """Compare the store with the result of packing now. A store without an index is skipped."""
    try:
        listed = {entry.fqn: entry for entry in packed_store.read_index(folder).layers}
    except InputRefused:
        return
    for fqn, content in pack_in_memory(folder, weights=checkpoint, trust_remote_code=trusted):
        remedy = packed_store.damaged(folder, folder / packed_store.FOLDER / packed_store.file_name(fqn), "").hint
        expected = listed[fqn].content if fqn in listed else ""
        yield _compared("packed from source", content, expected, fqn, remedy)

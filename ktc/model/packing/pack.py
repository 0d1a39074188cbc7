"""Packing a compiled model's experts into its store, one layer at a time, so that a kill costs one layer at most.

In: a compiled model and its checkpoint. Out: `OUT/packed`, complete and sealed, and a report. Layers that were packed
for this model are kept, by their header and size; those that another model's store has alike are linked; leftovers are
removed. Refused: a model whose experts no kernel runs
(L443), values that are not finite (L407), a place that cannot be written (L444), a second packer (L445).
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torch import nn

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.files import remove_stale_temp
from ktc.foundation.machine_faults import failed, fault_in
from ktc.foundation.progress import Progress, Tally
from ktc.model.checkpoint import CheckpointIndex, WeightSource
from ktc.model.checkpoint.reader import TensorReader
from ktc.model.experts.module import FusedMoe
from ktc.model.loading import load_as
from ktc.model.loading.compiled_model import compiled_class
from ktc.model.loading.opened import Opened, open_folder
from ktc.model.manifest.manifest import read_manifest
from ktc.model.packed_store import packed_file, packed_store, weight_store
from ktc.model.packed_store.finite_weights import is_finite, not_finite
from ktc.model.packed_store.packed_file import Damaged, Header
from ktc.model.packed_store.packed_store import Layer, PackedIndex
from ktc.model.packing import sharing

_IN_THE_WAY = (IsADirectoryError, NotADirectoryError, FileExistsError)


@dataclass(frozen=True, slots=True)
class PackReport:
    """The result of a run: the layers it packed, those already finished, and the packed bytes of all of them.

    Layers that are `linked` share their file with another model's store.
    """

    folder: Path
    packed: tuple[str, ...]
    kept: tuple[str, ...]
    size: int
    linked: tuple[str, ...] = ()


def pack(
    path: str | Path,
    *,
    weights: str | Path | None = None,
    force: bool = False,
    trust_remote_code: bool = False,
    others: Sequence[str | Path] = (),
    progress: Progress | None = None,
) -> PackReport:
    """Pack the missing layers of the store of the compiled model in `path`; with `force` every layer.

    `weights` names the checkpoint if it has moved, `trust_remote_code` is that of `ktc.load`. Memory holds one layer.
    Layers that the store of one of the compiled models `others` has alike become links to its files.
    `progress` counts the bytes read from the checkpoint and written to the store. Raise `InputRefused` as `ktc.load`
    does, and L443 to L445.
    """
    opened = _open(Path(path), weights, trust_remote_code)
    checkpoint = packed_store.checkpoint_digest(opened.index)
    layers = packed_store.layers(opened.manifest, opened.rows, opened.index)
    store = opened.folder / packed_store.FOLDER
    with _sole_writer(store):
        kept = {} if force else _finished(store, layers)
        missing = [layer for layer in layers if layer.step.fqn not in kept]
        if not missing and _is_sealed(opened):
            return _report(opened, (), kept)
        (store / packed_store.INDEX).unlink(missing_ok=True)  # until every layer is there again
        linked = sharing.linked_layers(store, missing, [Path(other) for other in others])
        made = _pack_layers(opened, store, [layer for layer in missing if layer.step.fqn not in linked], progress)
        headers = [{**kept, **linked, **made}[layer.step.fqn] for layer in layers]
        _seal(opened.folder, packed_store.make_index(headers, checkpoint))
    return _report(opened, tuple(made), kept, tuple(linked))


def link(path: str | Path, others: Sequence[Path], *, trust_remote_code: bool = False) -> PackReport | None:
    """Make the store of the compiled model in `path` of links to those of `others`, which have the same checkpoint.

    Nothing is packed: None where the model has a store, no layers, or layers that none of the others has alike.
    Raise `InputRefused` as `pack` does.
    """
    opened = open_folder(Path(path), None, trusted=trust_remote_code)
    layers = packed_store.layers(opened.manifest, opened.rows, opened.index)
    store = opened.folder / packed_store.FOLDER
    if not layers or store.exists():
        return None
    # A checkpoint's digest has no contents: the folder distinguishes files of equal names, sizes and times.
    alike = [other for other in others if _checkpoint_of(other) == opened.manifest.model.folder]
    made: tuple[str, ...] = ()
    try:
        with _sole_writer(store):
            headers = sharing.linked_layers(store, layers, alike)
            if len(headers) == len(layers):
                _pack_layers(opened, store, (), None)
                checkpoint = packed_store.checkpoint_digest(opened.index)
                _seal(opened.folder, packed_store.make_index([headers[one.step.fqn] for one in layers], checkpoint))
                made = tuple(headers)
    finally:
        if not made:
            shutil.rmtree(store, ignore_errors=True)
    return _report(opened, (), {}, made) if made else None


def _checkpoint_of(folder: Path) -> str:
    try:
        return read_manifest(folder).model.folder
    except InputRefused:
        return ""


def pack_in_memory(
    path: Path, *, weights: str | Path | None = None, trust_remote_code: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield the name of each layer and its content digest if packed now, without writing."""
    opened = _open(path, weights, trust_remote_code)
    skeleton = _Skeleton(opened)

    def digest(layer: Layer) -> str:
        with skeleton.packed(layer, opened.index, Tally(0, None)) as module:
            return packed_file.digest_of(module.weights.packed_storage)

    for layer in packed_store.layers(opened.manifest, opened.rows, opened.index):
        yield layer.step.fqn, digest(layer)


def _open(path: Path, weights: str | Path | None, trusted: bool) -> Opened:
    opened = open_folder(path, weights, trusted=trusted)
    if opened.library is None or not any(map(packed_store.is_stored, opened.manifest.rewrites)):
        message = f"no kernel runs frozen experts of `{opened.folder}`, so there is nothing to pack"
        raise InputRefused(Diagnostic("L443", message, hint="compile it by rules with `cpu_moe`"))
    return opened


def _report(
    opened: Opened, packed: tuple[str, ...], kept: dict[str, Header], linked: tuple[str, ...] = ()
) -> PackReport:  # fmt: skip
    size = sum(entry.size - packed_file.DATA for entry in packed_store.read_index(opened.folder).layers)
    return PackReport(opened.folder / packed_store.FOLDER, packed, tuple(kept), size, linked)


# Finished layers


@contextmanager
def _sole_writer(store: Path) -> Generator[None]:
    """Create the store's folder if needed, lock it against other packers, and remove files of killed ones."""
    with _writing(store):
        store.mkdir(exist_ok=True)
        lock = os.open(store, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            message = f"another process is packing into `{store}`"
            raise InputRefused(Diagnostic("L445", message, hint="wait for it to end")) from error
        with _writing(store):
            remove_stale_temp(store)
            yield
    finally:
        os.close(lock)


@contextmanager
def _writing(store: Path) -> Generator[None]:
    """Raise HostLacks or InputRefused (L444) about the store for an OSError inside."""
    try:
        yield
    except OSError as error:
        fault = fault_in(error)
        mend = fault.remedy if fault else "permit it"
        if isinstance(error, _IN_THE_WAY):
            mend = f"move `{error.filename2 or error.filename or store}` away"
        hint = f"{mend}, then continue: `{packed_store.renewal(store.parent)}`"
        message = f"the packed store `{store}` cannot be written"
        raise failed(error, "L444", message, hint=hint, safe="finished layers are kept") from error


@contextmanager
def _reading(checkpoint: Path) -> Generator[None]:
    """Raise InputRefused (L405) about the checkpoint for an OSError inside."""
    try:
        yield
    except OSError as error:
        message = f"the checkpoint `{checkpoint}` cannot be read: {error.strerror or error}"
        raise InputRefused(Diagnostic("L405", message, hint="restore its files; finished layers are kept")) from error


def _finished(store: Path, layers: Sequence[Layer]) -> dict[str, Header]:
    """Return the layers whose file is complete and belongs to the model."""
    headers: dict[str, Header] = {}
    for layer in layers:
        try:
            header = packed_file.read_header(store / packed_store.file_name(layer.step.fqn))
        except (Damaged, FileNotFoundError):
            continue
        if not packed_store.changed(header, layer):
            headers[layer.step.fqn] = header
    return headers


def _is_sealed(opened: Opened) -> bool:
    """Return whether the index matches the finished layers."""
    try:
        store = packed_store.find_store(opened.folder, opened.manifest, opened.rows, opened.index)
    except InputRefused:
        return False
    return isinstance(store, packed_store.PackedStore)


# Packing


class _Skeleton:
    """The model with its recipe realised, in which one layer after the other gets its experts and loses them.

    Layers without packed experts take no memory, so the model holds one layer at a time.
    """

    def __init__(self, opened: Opened) -> None:
        model_class = compiled_class(opened.stock_class)
        self.model = load_as.realised_on_meta(model_class, opened.folder, opened.manifest, opened.library)

    def size(self, layer: Layer) -> int:
        """Return the bytes that the packed layer will have."""
        return cast("FusedMoe", self.model.get_submodule(layer.step.fqn)).packed_bytes

    @contextmanager
    def packed(self, layer: Layer, index: CheckpointIndex, tally: Tally) -> Generator[FusedMoe]:
        """Yield the experts of one layer, packed from the checkpoint; release their memory afterwards."""
        fqn = layer.step.fqn
        module = cast("FusedMoe", self.model.get_submodule(fqn))
        try:
            with _reading(index.folder):
                weight_store.fill(self.model, layer.rows, index, {}, progress=tally.stage())
            if module.missing():
                message = f"nothing in the checkpoint fills `{fqn}` ({len(module.missing())} parts of experts)"
                raise InputRefused(Diagnostic("L408", message, hint="compile the model again"))
            yield module
        finally:
            parent, _, name = fqn.rpartition(".")
            setattr(self.model.get_submodule(parent), name, nn.Identity())


def _pack_layers(
    opened: Opened, store: Path, missing: Sequence[Layer], progress: Progress | None
) -> dict[str, Header]:  # fmt: skip
    skeleton = _Skeleton(opened) if missing else None
    plain = [row for row in opened.rows if row.is_plain]  # a mapped load takes these without a check
    to_write = sum(map(skeleton.size, missing)) if skeleton else 0
    _check_space(store, to_write)
    rows = (*plain, *(row for layer in missing for row in layer.rows))
    to_read = sum(weight_store.stored_bytes(row, opened.index) for row in rows)
    tally = Tally(to_write + to_read, progress)

    def pack_layer(layer: Layer) -> Header:  # no name may hold one layer while the next is packed
        assert skeleton is not None
        with skeleton.packed(layer, opened.index, tally) as module:
            return _write(store, layer, module, tally)

    made = {layer.step.fqn: pack_layer(layer) for layer in missing}
    _check_finite(plain, opened.index, tally)
    return made


def _write(store: Path, layer: Layer, module: FusedMoe, tally: Tally) -> Header:
    assert layer.step.kernel is not None, "only layers that a kernel runs are packed"
    fqn, kernel, origin, size = layer.step.fqn, layer.step.kernel, layer.origin, module.packed_bytes

    def header(content: str) -> Header:
        return Header(packed_file.SCHEMA, fqn, kernel, module.num_experts, size, origin, content)

    return packed_file.write(store / packed_store.file_name(fqn), header, module.weights.packed_storage, tally.add)


def _check_space(store: Path, needed: int) -> None:
    """Raise InputRefused now for a disk that is too small, instead of after an hour."""
    free = shutil.disk_usage(store).free
    if needed > free:
        message = f"the packed store `{store}` needs {needed:,} bytes more, its disk has {free:,}"
        raise InputRefused(Diagnostic("L444", message, hint="free some space; what is packed already is kept"))


def _check_finite(rows: Sequence[WeightSource], index: CheckpointIndex, tally: Tally) -> None:
    with _reading(index.folder), TensorReader(index.folder) as reader:
        for row in rows:
            entry = index.tensors.get(row.source_key)
            if entry is not None:
                if not is_finite(reader.read(entry)):
                    raise InputRefused(not_finite(row, None))
                tally.add(entry.end - entry.begin)


def _seal(folder: Path, index: PackedIndex) -> None:
    """Write the index, and remove files of layers that the model no longer has."""
    named = {entry.file for entry in index.layers}
    for file in (folder / packed_store.FOLDER).glob(f"*{packed_store.SUFFIX}"):
        if file.name not in named:
            file.unlink()
    packed_store.write_index(folder, index)

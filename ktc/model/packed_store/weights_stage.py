"""The weights stage of a load: experts from a valid packed store, the rest from the checkpoint.

In: a model on meta tensors with its recipe realised. Out: the same model, filled. A stale or unfinished store is
reported and not used: with `map` this is an error (L440, L442, L443), otherwise a warning, and the experts are packed
again.
"""

from __future__ import annotations

import functools
import logging
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torch import nn

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.progress import Progress, Tally
from ktc.foundation.regular_files import open_descriptor
from ktc.model.checkpoint import CheckpointIndex, WeightSource
from ktc.model.experts.module import FusedMoe
from ktc.model.manifest.manifest import Manifest
from ktc.model.packed_store import packed_file, packed_store, weight_store
from ktc.model.packed_store.mapped_weights import map_weights
from ktc.model.packed_store.packed_file import Damaged
from ktc.model.packed_store.packed_store import PackedStore

log = logging.getLogger(__name__)

_READERS = 4  # a disk serves several readers faster than one, and first touches of memory run side by side


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Where the weights of a compiled model are: its rows, the checkpoint that they name, and a packed store."""

    sources: Sequence[WeightSource]
    index: CheckpointIndex
    store: PackedStore | None


def usable_store(
    folder: Path, manifest: Manifest, sources: Sequence[WeightSource], index: CheckpointIndex, *, map: bool
) -> PackedStore | None:
    """Return the store to load from, or `None`. Raise `InputRefused` (L441; with `map` also L440, L442, L443)."""
    store = packed_store.find_store(folder, manifest, sources, index)
    if isinstance(store, PackedStore):
        return store
    if map:
        message = f"`{folder}` has no packed store that could be mapped"
        nothing = Diagnostic("L443", message, hint=f"make one: `{packed_store.renewal(folder)}`")
        raise InputRefused(store or nothing)
    if store is not None:
        warnings.warn(f"{store.message}, so the experts are packed again ({store.hint})", stacklevel=4)
    return None


def fill_weights(
    model: nn.Module, placement: Mapping[str, str], *, stored: StoredWeights, map: bool, allow_nonfinite: bool = False,
    progress: Progress | None = None,
) -> None:  # fmt: skip
    """Load every tensor into `model`: experts from the store if it has them, read or mapped, others read.

    With `map`, parameters on the CPU are mapped from the checkpoint too: packing has checked their values, and
    the store is valid only for the files that it checked. Raise the errors of `weight_store.fill`, and L441.
    """
    started, index, store = time.perf_counter(), stored.index, stored.store
    packed = dict(store.headers) if store is not None else {}
    rest = [source for source in stored.sources if source.target.rpartition(".")[0] not in packed]
    if map:
        rest = list(map_weights(model, rest, index, placement))
    to_read = sum(weight_store.stored_bytes(source, index) for source in rest)
    tally = Tally(to_read + (store.size if store is not None and not map else 0), progress)
    if store is not None:
        if map:
            _map_experts(model, store)
        else:
            _read_experts(model, store, tally)
    weight_store.fill(model, rest, index, placement, allow_nonfinite=allow_nonfinite, progress=tally.stage())
    how = "packed from the checkpoint" if store is None else "mapped" if map else "read from the packed store"
    log.info("weights: experts %s, %.2f s in all", how, time.perf_counter() - started)


def _map_experts(model: nn.Module, store: PackedStore) -> None:
    for fqn, header in store.headers.items():
        module, path = _experts(model, store, fqn), store.path(fqn)
        try:
            mapped = packed_file.map_read_only(path, header.packed_bytes)
        except (OSError, ValueError) as error:  # `mmap` raises the latter for a file that is too short
            raise InputRefused(packed_store.damaged(store.folder.parent, path, str(error))) from error
        module.weights.take_packed(mapped)


def _read_experts(model: nn.Module, store: PackedStore, tally: Tally) -> None:
    """Read layer by layer in the order of the bytes, in large pieces, straight into the modules' huge pages."""
    for fqn in store.headers:
        module, path = _experts(model, store, fqn), store.path(fqn)
        try:
            module.weights.fill_packed(functools.partial(_read_file, path, tally))
        except (Damaged, OSError) as error:
            raise InputRefused(packed_store.damaged(store.folder.parent, path, str(error))) from error


def _read_file(path: Path, tally: Tally, target: memoryview) -> None:
    def read(offset: int) -> int:
        return packed_file.read_into(descriptor, target[offset : offset + packed_file.PIECE], offset)

    descriptor = open_descriptor(path)
    try:
        os.posix_fadvise(descriptor, packed_file.DATA, len(target), os.POSIX_FADV_SEQUENTIAL)
        with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as pool:
            for count in pool.map(read, packed_file.offsets(len(target))):
                tally.add(count)
    finally:
        os.close(descriptor)


def _experts(model: nn.Module, store: PackedStore, fqn: str) -> FusedMoe:
    """Return the module of a layer, which must need exactly the bytes of its file."""
    module = cast("FusedMoe", model.get_submodule(fqn))
    stored = store.headers[fqn].packed_bytes
    if module.packed_bytes != stored:
        what = f"it has {stored} packed bytes, the kernel needs {module.packed_bytes}"
        raise InputRefused(packed_store.damaged(store.folder.parent, store.path(fqn), what))
    return module
